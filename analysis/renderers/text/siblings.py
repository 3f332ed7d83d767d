# SPDX-License-Identifier: Apache-2.0
"""The sessions of one program: a table of all, then the summary of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from analysis.judgement.siblings import Sibling, Siblings
from analysis.renderers.text import screen, summary
from analysis.renderers.text.layout import WIDTH, Line, row, section, table
from analysis.renderers.text.painting import paint, plain
from analysis.wording.formats import counted, number, percent, share


def write(found: Siblings, out: TextIO, *, full: bool = False) -> None:
    """Print the table and the summaries, each on a screen or in full."""
    paint(lambda bar: _layout(found, bar, full=full), out)


def render(found: Siblings, *, full: bool = False) -> str:
    """The same as plain text."""
    return plain(lambda bar: _layout(found, bar, full=full))


def _layout(found: Siblings, bar: str, *, full: bool) -> Iterator[Line]:
    layout = summary.layout if full else screen.layout
    sessions = found.sessions
    yield (
        ("profilemate  ", "label"),
        (f"{counted(len(sessions), 'session')} of a program", "title"),
    )
    yield from section("Sessions", _in_short(sessions))
    for one in found.summaries:
        yield ()
        yield (("=" * WIDTH, "label"),)
        # All are here: none needs to name the others.
        yield from layout(replace(one, session=replace(one.session, siblings=())), bar)


_HEADS = ("", "engines", "blocks", "requests", "hit rate", "evictions", "peak usage")


def _in_short(sessions: Sequence[Sibling]) -> Iterator[Line]:
    for place, one in enumerate(sessions, start=1):
        yield from row(str(place), one.session_id, one.model or "")
    yield ()
    rows = [
        (
            str(place),
            str(one.engines),
            number(one.pool_blocks),
            number(one.requests),
            share(one.token_rate),
            number(one.evicted_blocks),
            percent(one.peak_pct),
        )
        for place, one in enumerate(sessions, start=1)
    ]
    yield from table(_HEADS, rows)
