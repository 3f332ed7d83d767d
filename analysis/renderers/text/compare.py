# SPDX-License-Identifier: Apache-2.0
"""Sessions side by side: what was configured otherwise, and what became of each measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from analysis.judgement.comparison import NAMES, SAME, Comparison, Row, Setting
from analysis.renderers.text.layout import WIDTH, Line, note, section, table, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.summary import About
from analysis.wording import measures
from analysis.wording.printable import printable
from analysis.wording.session import window


def write(found: Comparison, out: TextIO) -> None:
    """Print the comparison."""
    paint(lambda _: _layout(found), out)


def render(found: Comparison) -> str:
    """The comparison as plain text."""
    return plain(lambda _: _layout(found))


def _layout(found: Comparison) -> Iterator[Line]:
    for number, (name, about) in enumerate(zip(NAMES, found.sessions, strict=False)):
        yield from _session(name, about, is_baseline=number == 0)
    yield from section("Configuration that differs", _configuration(found.configuration))
    for number, doubts in enumerate(found.doubts, start=1):
        heading = f"{NAMES[number]} against the baseline {NAMES[0]}"
        yield from section(heading, _pair(found.measures, doubts, number))


def _session(name: str, about: About, *, is_baseline: bool) -> Iterator[Line]:
    baseline = "  (the baseline)" if is_baseline else ""
    yield ((f"{name}  ", "label"), (about.session_id, "title"), (baseline, "label"))
    yield ((f"   {about.directory}", "label"),)
    length = window(about)
    yield ((f"   {length}, {about.state}", "label"),)


def _configuration(settings: Sequence[Setting]) -> Iterator[Line]:
    if not settings:
        yield from note(measures.NOTHING_DIFFERS)
        return
    names = NAMES[: len(settings[0].values)]
    rows = [(s.name, *(value or measures.NONE for value in s.values)) for s in settings]
    columns = list(zip(("", *names), *rows, strict=True))
    if sum(2 + max(len(printable(cell)) for cell in column) for column in columns) <= WIDTH:
        yield from table(("", *names), rows)
        return
    for setting, *values in rows:
        yield ((f"  {setting}", "label"),)
        for name, value in zip(names, values, strict=True):
            yield from wrapped(f"    {name}  ", value, "label", "")


def _pair(rows: Sequence[Row], doubts: Sequence[str], number: int) -> Iterator[Line]:
    if doubts:
        yield from note("Not comparable, so no change is called better or worse:")
        for doubt in doubts:
            yield from wrapped("  - ", doubt, "warning", "warning")
        yield ()
    known = [row for row in rows if row.values[0] is not None or row.values[number] is not None]
    cells = [_cells(row, number) for row in known]
    yield from table(("", NAMES[0], NAMES[number], "change", "", ""), cells)
    if not doubts:
        yield from note(
            "A measure that has no direction is neither better nor worse; a change of up to "
            f"{100 * SAME:g} % counts as the same."
        )


def _cells(row: Row, number: int) -> tuple[str, ...]:
    change = row.changes[number - 1]
    return (
        row.name,
        measures.figure(row.values[0], row.unit),
        measures.figure(row.values[number], row.unit),
        measures.change(change.absolute, change.relative, row.unit),
        measures.relative_change(change.absolute, change.relative),
        change.verdict or "",
    )
