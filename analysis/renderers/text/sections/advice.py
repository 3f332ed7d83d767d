# SPDX-License-Identifier: Apache-2.0
"""What to change, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.judgement.advice import Advice
from analysis.renderers.text.layout import Line, fill, note
from analysis.wording.advice import NONE, setting

_INDENT = 5


def lines(advice: Sequence[Advice]) -> Iterator[Line]:
    """The advice, numbered; or that there is none."""
    if not advice:
        yield from note(NONE)
        return
    for number, one in enumerate(advice, 1):
        yield from _advice(number, one)


def _advice(number: int, one: Advice) -> Iterator[Line]:
    for at, line in enumerate(fill(one.says, 80 - _INDENT)):
        yield ((f"  {number}. " if at == 0 else " " * _INDENT, "label"), (line, "title"))
    change = setting(one.flag, one.value)
    for line in fill(change, 80 - _INDENT) if change else ():
        yield ((" " * _INDENT, ""), (line, "figure"))
    for evidence in one.evidence:
        yield from _indented("Because ", evidence)
    yield from _indented("Expect: ", f"{one.expect} (confidence: {one.confidence})")


def _indented(head: str, text: str) -> Iterator[Line]:
    for at, line in enumerate(fill(head + text, 80 - _INDENT)):
        words = line.removeprefix(head) if at == 0 else line
        yield ((" " * _INDENT + (head if at == 0 else ""), "label"), (words, ""))
