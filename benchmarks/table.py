# SPDX-License-Identifier: Apache-2.0
"""The table of results against the targets and what was kept of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.command import number, spread, target
from benchmarks.history import Kept
from benchmarks.result import Result, verdict

_STYLES = {"met": "green", "missed": "yellow", "worse": "bold red", "better": "bold green"}


def render(results: Sequence[Result], kept: Mapping[str, Kept], machine: str) -> Table:
    """A row for each result."""
    table = Table(caption=machine, caption_justify="left")
    for column in ("benchmark", "target", "last committed", "now", "verdict"):
        table.add_column(column, overflow="fold")
    for result in results:
        before = kept.get(result.name)
        table.add_row(
            result.name,
            Text(target(result)),
            Text(_committed(before, machine)),
            Text(result.note if result.figure is None else _figure(result)),
            _verdict(result, before, machine),
        )
    return table


def comparable(before: Kept | None, machine: str) -> Result | None:
    """The earlier result, if it is from a machine like this one."""
    return before.result if before is not None and before.machine == machine else None


def _figure(result: Result) -> str:
    figure = "" if result.figure is None else f"{number(result.figure)} {result.unit}"
    return f"{figure}\n{spread(result)}".rstrip()


def _committed(before: Kept | None, machine: str) -> str:
    if before is None:
        return "none"
    where = "" if before.machine == machine else ", another machine"
    return f"{_figure(before.result)}\n{before.date}{where}"


def _verdict(result: Result, before: Kept | None, machine: str) -> Text:
    words = verdict(result, comparable(before, machine))
    text = Text(words)
    for word, style in _STYLES.items():
        text.highlight_words([word], style)
    return text
