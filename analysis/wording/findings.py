# SPDX-License-Identifier: Apache-2.0
"""Findings in words: the same in every renderer."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.summary import Finding

NOTHING = "Nothing that costs a hundredth of the tokens, the time or the memory."


def sentence(finding: Finding) -> str:
    """The finding, and the section of the summary that has the details."""
    return f"{finding.says[0].upper()}{finding.says[1:]} [{finding.section}]"


def all_right(topics: Sequence[str], width: int | None = None) -> str:
    """What is fine, in so many columns; empty where nothing is known to be."""
    for shown in range(len(topics), 0, -1):
        left = len(topics) - shown
        more = f", and {left} more topics" if left > 1 else ", and 1 more topic" if left else ""
        words = f"Fine: {', '.join(topics[:shown])}{more}."
        if width is None or len(words) <= width:
            return words
    return ""
