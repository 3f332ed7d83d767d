# SPDX-License-Identifier: Apache-2.0
"""The words around a piece of advice."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.summary import Finding


def none(findings: Sequence[Finding], warnings: Sequence[str]) -> str:
    """What stands in the place of advice where there is none."""
    if findings:
        return "No setting is known to mend what was found."
    if warnings:
        return "No advice: the warnings come first."
    return "Nothing in this session asks for another setting."


def setting(flag: str | None, value: str | None) -> str:
    """The flag and its value as ``vllm serve`` takes them; empty where no flag does it."""
    return f"{flag} {value or ''}".strip() if flag else ""
