# SPDX-License-Identifier: Apache-2.0
"""What to change, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.judgement.advice import Advice
from analysis.renderers.text.layout import Line, fill, note

_INDENT = 5


def lines(advice: Sequence[Advice]) -> Iterator[Line]:
    """The advice, numbered; or that there is none."""
    if not advice:
        yield from note("Nothing in this session asks for another setting.")
        return
    for number, piece in enumerate(advice, 1):
        yield from _piece(number, piece)


def _piece(number: int, piece: Advice) -> Iterator[Line]:
    setting = f"{piece.flag} {piece.value or ''}".strip() if piece.flag else ""
    for at, line in enumerate(fill(piece.says, 80 - _INDENT)):
        yield ((f"  {number}. " if at == 0 else " " * _INDENT, "label"), (line, "title"))
    for line in fill(setting, 80 - _INDENT) if setting else ():
        yield ((" " * _INDENT, ""), (line, "figure"))
    for evidence in piece.evidence:
        yield from _indented("Because ", evidence)
    yield from _indented("Expect: ", f"{piece.expect} (confidence: {piece.confidence})")


def _indented(head: str, text: str) -> Iterator[Line]:
    for at, line in enumerate(fill(head + text, 80 - _INDENT)):
        words = line.removeprefix(head) if at == 0 else line
        yield ((" " * _INDENT + (head if at == 0 else ""), "label"), (words, ""))
