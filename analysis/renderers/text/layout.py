# SPDX-License-Identifier: Apache-2.0
"""The lines that text is laid out in: 80 columns, styled, ASCII."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from analysis.wording.printable import printable

WIDTH = 80
LABEL = 20

Styled = tuple[str, str]
"""Text and the name of its style; no style is the empty name."""
Line = tuple[Styled, ...]


def section(heading: str, lines: Iterable[Line]) -> Iterator[Line]:
    """The lines under their heading; neither where there is no line."""
    for number, line in enumerate(lines):
        if not number:
            yield ()
            yield ((heading, "heading"),)
        yield line


def row(label: str, figure: str, more: str = "") -> Iterator[Line]:
    """A label, a figure, and what there is to say of it, wrapped under the figure."""
    words = f"{figure}  {more}" if more else figure
    room = WIDTH - LABEL - 2
    for number, line in enumerate(fill(words, room)):
        strong = min(len(line), len(figure)) if number == 0 and more else 0
        head = label_cell(label if number == 0 else "")
        yield (head, (line[:strong], "figure"), (line[strong:], ""))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """Columns aligned to the right under their heads, the first one under the labels; large
    figures take room from the labels' column."""
    lines = [tuple(map(printable, cells)) for cells in (heads, *rows)]
    widths = [2 + max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = max(widths[0] - 2, min(LABEL, WIDTH - 2 - sum(widths[1:])))
    for number, (label, *cells) in enumerate(lines):
        figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        style = "figure" if number else "label"
        yield (f"  {label:<{widths[0]}}", "label"), (figures.rstrip(), style)


def note(text: str) -> Iterator[Line]:
    for line in fill(text, WIDTH - 2):
        yield ((f"  {line}", ""),)


def wrapped(head: str, text: str, head_style: str, style: str) -> Iterator[Line]:
    for number, line in enumerate(fill(text, WIDTH - len(head))):
        start = head if number == 0 else " " * len(head)
        yield ((start, head_style), (line, style))


def fill(text: str, width: int) -> list[str]:
    together = _BEFORE_UNIT.sub(_NO_BREAK, printable(text))
    lines = textwrap.wrap(together, width, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


_NO_BREAK = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mu]?s|min|h|[KMGT]?i?B)(?!\w))")


def label_cell(text: str) -> Styled:
    return (f"  {text:<{LABEL}}", "label")
