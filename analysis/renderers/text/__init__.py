# SPDX-License-Identifier: Apache-2.0
"""The summary as text for people: 80 columns, with colour where rich and a terminal are there.

The layout is made once, as lines of styled pieces; rich paints them, and without it, or into a
pipe, the same lines come out plain and in ASCII.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from analysis.renderers.text import blocks, evictions, prefix_cache, requests, session, usage
from analysis.renderers.text.layout import Line, printable, section, wrapped
from analysis.summary import About, Summary

_STYLES = {
    "title": "bold",
    "heading": "bold cyan",
    "label": "dim",
    "figure": "bold",
    "warning": "bold yellow",
    "bar": "cyan",
    "": "",
}


def write(summary: Summary, out: TextIO) -> None:
    """Print the summary."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        out.write(render(summary) + "\n")
        return
    console = Console(file=out, highlight=False, emoji=False, markup=False)
    pretty = console.is_terminal and console.encoding.startswith("utf")
    for line in _lines(summary, "█" if pretty else "#"):
        painted = Text.assemble(*((text, _STYLES[style]) for text, style in line))
        console.print(painted, soft_wrap=True)


def render(summary: Summary) -> str:
    """The summary as plain text."""
    return "\n".join("".join(text for text, _ in line) for line in _lines(summary, "#"))


def _lines(summary: Summary, bar: str) -> Iterator[Line]:
    for line in _layout(summary, bar):
        yield tuple((printable(text), style) for text, style in line)


def _layout(summary: Summary, bar: str) -> Iterator[Line]:
    yield from _header(summary.session)
    for warning in summary.warnings:
        yield from wrapped("Warning: ", warning, "warning", "warning")
    yield from section("Session", session.lines(summary.session, summary.facts))
    yield from section("KV cache usage, weighted by time", usage.lines(summary.usage, bar))
    yield from section("Blocks", blocks.lines(summary))
    yield from section("Prefix cache", prefix_cache.lines(summary.prefix_cache, summary.facts))
    yield from section("Evictions", evictions.lines(summary.evictions, summary.lifetimes))
    yield from section("Requests", requests.lines(summary))
    yield from section("Profiling", session.profiling(summary.cost))


def _header(about: About) -> Iterator[Line]:
    yield (("profilemate  ", "label"), (about.session_id, "title"))
    yield ((about.directory, "label"),)
    if about.state != "complete":
        state = "Still running" if about.state == "running" else "Cut off"
        yield from wrapped(f"{state}: ", about.note or "", "warning", "")
