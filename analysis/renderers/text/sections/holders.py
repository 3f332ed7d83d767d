# SPDX-License-Identifier: Apache-2.0
"""Who holds blocks at the end, and which blocks leaked."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.pool.holders import Holders
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.formats import duration
from analysis.wording.printable import shortened

SHOWN = 3
"""Holders that are named, and suspects."""
NAME = 36
"""Characters of a request's id."""


def lines(holders: Holders | None) -> Iterator[Line]:
    """The section; empty where nothing was held at the end, or nobody knows by whom."""
    if holders is None or not holders.held_blocks:
        return
    if holders.oldest:
        yield from row("Held at the end", f"{holders.held_blocks:,} blocks", _by_whom(holders))
        rows = [
            (shortened(holder.request_id, NAME), f"{holder.blocks:,}", duration(holder.age_sec))
            for holder in holders.oldest[:SHOWN]
        ]
        yield from table(("The oldest", "blocks", "held for"), rows)
    if holders.leaked_blocks:
        yield from _leak(holders)


def _by_whom(holders: Holders) -> str:
    more = holders.blocks > holders.held_blocks
    each = f"; {holders.blocks:,} if shared blocks count for each" if more else ""
    noun = "request" if holders.requests == 1 else "requests"
    return f"by {holders.requests:,} {noun} that had not ended{each}"


def _leak(holders: Holders) -> Iterator[Line]:
    least = "at least " if holders.at_least else ""
    why = "no running or waiting request holds them"
    if holders.idle_sec is not None:
        why += f"; there had been none for {duration(holders.idle_sec)}"
    yield from row("Leaked", f"{least}{holders.leaked_blocks:,} blocks", why)
    for suspect in holders.suspects[:SHOWN]:
        ended = duration(holders.at_sec - suspect.ended_sec)
        yield from note(
            f"{shortened(suspect.request_id, NAME)} ended {ended} before, "
            f"and {suspect.blocks:,} blocks that it got have not been freed"
        )
