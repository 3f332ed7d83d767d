# SPDX-License-Identifier: Apache-2.0
"""The options that say which part of a session is exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from profilemate.commands.shared.values import seconds

if TYPE_CHECKING:
    from analysis.export.part import Part


@dataclass(frozen=True)
class Window:
    """Seconds since a session began; None for no limit."""

    begin_sec: float | None = None
    end_sec: float | None = None


def window(text: str) -> Window:
    """Two times, either of which may be missing.

    >>> window("10s:20s"), window("1m:")
    (Window(begin_sec=10.0, end_sec=20.0), Window(begin_sec=60.0, end_sec=None))
    """
    begin, colon, end = str(text).partition(":")
    if not colon or not (begin or end):
        raise typer.BadParameter(f"{text!r} is not a window; write 10s:20s, 10s: or :20s")
    found = Window(seconds(begin) if begin else None, seconds(end) if end else None)
    if begin and end and seconds(begin) >= seconds(end):
        raise typer.BadParameter(f"{text!r} ends before it begins; write the earlier time first")
    return found


@dataclass(frozen=True)
class Names:
    """Ids of requests."""

    ids: frozenset[str]


def names(text: str) -> Names:
    """Ids with commas between them."""
    ids = frozenset(name.strip() for name in str(text).split(",") if name.strip())
    if not ids:
        raise typer.BadParameter("no id is given; write ids of requests with commas between them")
    return Names(ids)


WindowOption = Annotated[
    Window | None,
    typer.Option(
        "--window",
        metavar="FROM:TO",
        parser=window,
        help="Only what is between these times since the session began: 10s:20s, 5m:, :1h. "
        "Requests that reach into it are there whole.",
        show_default=False,
    ),
]

RequestsOption = Annotated[
    Names | None,
    typer.Option(
        "--requests",
        metavar="ID,...",
        parser=names,
        help="Only these requests, and what was evicted by them or of them. The beginning of an "
        "id will do where no other id begins so.",
        show_default=False,
    ),
]


def part_of(within: Window | None, chosen: Names | None) -> Part:
    """The part that the options say."""
    from analysis.export.part import Part

    limits = within or Window()
    return Part(limits.begin_sec, limits.end_sec, chosen.ids if chosen else None)
