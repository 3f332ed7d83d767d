# SPDX-License-Identifier: Apache-2.0
"""The words around a piece of advice."""

from __future__ import annotations

NONE = "Nothing in this session asks for another setting."


def setting(flag: str | None, value: str | None) -> str:
    """The flag and its value as ``vllm serve`` takes them; empty where no flag does it."""
    return f"{flag} {value or ''}".strip() if flag else ""
