# SPDX-License-Identifier: Apache-2.0
"""Styled lines onto a screen: rich paints them; without it, or into a pipe, they come out plain and
in ASCII."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from analysis.renderers.text.layout import Line
from analysis.wording.printable import printable

_STYLES = {
    "title": "bold",
    "heading": "bold cyan",
    "label": "dim",
    "figure": "bold",
    "good": "green",
    "warning": "bold yellow",
    "bar": "cyan",
    "": "",
}

Layout = Callable[[str], Iterable[Line]]
"""Makes the lines, given the character that bars are drawn with."""


def paint(layout: Layout, out: TextIO) -> None:
    """Print the lines."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        out.write(plain(layout) + "\n")
        return
    console = Console(file=out, highlight=False, emoji=False, markup=False)
    pretty = console.is_terminal and console.encoding.startswith("utf")
    for line in _printable(layout("█" if pretty else "#")):
        painted = Text.assemble(*((text, _STYLES[style]) for text, style in line))
        console.print(painted, soft_wrap=True)


def plain(layout: Layout) -> str:
    """The lines as plain text."""
    return "\n".join("".join(text for text, _ in line) for line in _printable(layout("#")))


def _printable(lines: Iterable[Line]) -> Iterator[Line]:
    for line in lines:
        yield tuple((printable(text), style) for text, style in line)
