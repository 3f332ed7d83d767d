# SPDX-License-Identifier: Apache-2.0
"""What to change, and why."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.text.layout import Line, fill, note
from analysis.summary import Advice, Summary
from analysis.wording.advice import known, none, setting

_INDENT = 5


def lines(summary: Summary) -> Iterator[Line]:
    """The advice, numbered; or that there is none."""
    if not summary.advice:
        yield from note(none(summary.findings, summary.warnings))
        return
    for number, one in enumerate(summary.advice, 1):
        yield from what(number, one)
        yield from _why(one)


def what(number: int, one: Advice) -> Iterator[Line]:
    """What to do, and how its effect is known, without the reasons."""
    for at, line in enumerate(fill(one.says, 80 - _INDENT)):
        yield ((f"  {number}. " if at == 0 else " " * _INDENT, "label"), (line, "title"))
    change = setting(one.flag, one.value)
    for line in fill(change, 80 - _INDENT) if change else ():
        yield ((" " * _INDENT, ""), (line, "figure"))
    yield from _indented("How known: ", known(one))


def _why(one: Advice) -> Iterator[Line]:
    for evidence in one.evidence:
        yield from _indented("Because ", evidence)
    yield from _indented("Expect: ", f"{one.expect} (confidence: {one.confidence})")


def _indented(head: str, text: str) -> Iterator[Line]:
    for at, line in enumerate(fill(head + text, 80 - _INDENT)):
        words = line.removeprefix(head) if at == 0 else line
        yield ((" " * _INDENT + (head if at == 0 else ""), "label"), (words, ""))
