# SPDX-License-Identifier: Apache-2.0
"""What ran, where, and what recording it took."""

from __future__ import annotations

from analysis.renderers.text import session
from analysis.summary import Summary

Row = tuple[str, str]


def rows(summary: Summary) -> list[Row]:
    """The facts that the text output has, as a label and what there is to say."""
    lines = [
        *session.lines(summary.session, summary.facts, summary.usage),
        *session.profiling(summary.cost),
    ]
    found: list[Row] = []
    for (label, _), *pieces in lines:
        words = "".join(text for text, _ in pieces).strip()
        if label.strip():
            found.append((label.strip(), words))
        else:  # what had no room in the line above
            found[-1] = (found[-1][0], f"{found[-1][1]} {words}")
    return found
