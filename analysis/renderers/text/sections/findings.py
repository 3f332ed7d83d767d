# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the session, the costliest first, and what is fine."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.judgement.findings import fine
from analysis.renderers.text.layout import WIDTH, Line, fill, note
from analysis.summary import Finding, Summary
from analysis.wording.findings import NOTHING, all_right, sentence

_INDENT = 4


def lines(summary: Summary) -> Iterator[Line]:
    """Each finding, then what is fine in one line."""
    if not summary.findings:
        yield from note(NOTHING)
    for finding in summary.findings:
        yield from one(finding)
    yield from what_is_fine(summary)


def one(finding: Finding) -> Iterator[Line]:
    """A finding, with the section that has the details."""
    for at, line in enumerate(fill(sentence(finding), WIDTH - _INDENT)):
        yield (("  - " if at == 0 else " " * _INDENT, "label"), (line, ""))


def what_is_fine(summary: Summary) -> Iterator[Line]:
    """What is fine; no line where nothing is known to be."""
    if words := all_right(fine(summary), WIDTH - 2):
        yield ((f"  {words}", "good"),)
