# SPDX-License-Identifier: Apache-2.0
"""How many requests at once the pool has room for, and what was never used."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.headroom.demand import Day
from analysis.headroom.head_room import Crowd, HeadRoom, Room, Setting
from analysis.headroom.longest import Cut, Longest
from analysis.headroom.unused import Unused
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.formats import byte_size, counted, seconds, share

DAYS = 7
"""Days that are shown: those with the highest peaks."""


def lines(found: HeadRoom) -> Iterator[Line]:
    """The section; empty where nothing is known."""
    if found.room is not None:
        yield from _room(found.room)
    yield from _days(found.days, found.room)
    if found.room is not None:
        yield from _settings(found.room)
    if found.longest is not None:
        yield from _longest(found.longest)
    for pool in found.unused:
        yield from _unused(pool, several=len(found.unused) > 1)


def _room(room: Room) -> Iterator[Line]:
    held = f"at a moment; 99 % up to {room.p99_blocks:,}; an answer adds {room.growth_blocks:,.1f}"
    yield from row("A running request", f"{room.mean_blocks:,.1f} blocks", held)
    fit = fitting(room.fit, room.most)
    rest = f"into {room.pool_blocks:,} blocks but for 1 % of the time"
    if room.half is not None:
        rest += f"; {room.half:,} but for half of it"
    if room.shared_share:
        rest += f"; {share(room.shared_share)} of their blocks are shared"
    yield from row("Fit at once", f"{fit} requests", rest)
    heads = ("Running at once", "mean blocks", "99 % need", "do not fit", "preempted")
    yield from table(heads, [_crowd(crowd) for crowd in room.crowds])


def fitting(fit: int | None, most: int) -> str:
    """How many requests fit, in words."""
    return f"{most:,} or more" if fit is None else f"{fit:,}"


def _crowd(crowd: Crowd) -> tuple[str, ...]:
    return (
        counted(crowd.requests, "request"),
        f"{crowd.mean_blocks:,.0f}",
        f"{crowd.p99_blocks:,}",
        share(crowd.over_share),
        f"{crowd.preemptions:.3f}",
    )


def _days(days: tuple[Day, ...], room: Room | None) -> Iterator[Line]:
    highest = sorted(days, key=lambda day: -day.peak_requests)[:DAYS]
    for day in sorted(highest, key=lambda day: day.peak_sec):
        rest = f"at {seconds(day.peak_sec)}; up to {day.p99_requests:,} for 99 % of the time"
        if room is not None and room.fit:
            rest += f"; {day.peak_requests / room.fit:.2f} times what fits"
        yield from row(f"Peak {day.date or ''}", f"{day.peak_requests:,} in an engine", rest)


def _settings(room: Room) -> Iterator[Line]:
    rows = [_setting(one, room) for one in room.settings]
    yield from table(("With this load", "max_num_seqs", "fit", "wait", "preemptions"), rows)
    yield from note(
        f"Estimated from {room.requests:,} requests, {room.draws:,} draws: a share is off by up to "
        f"{share(room.error)} (standard error). Preempted: times from admission to end, while so "
        "many would run. Wait: requests that find no place or no blocks. The load is as recorded; "
        "a queue makes it worse. whatif --blocks and --max-num-seqs replay it."
    )


def _setting(one: Setting, room: Room) -> tuple[str, ...]:
    return (
        counted(one.pool_blocks, "block"),
        "n/a" if one.max_num_seqs is None else f"{one.max_num_seqs:,}",
        f"{room.most:,}+" if one.fit is None else f"{one.fit:,}",
        share(one.waiting_share),
        f"{one.preemptions:,.0f}",
    )


def _longest(longest: Longest) -> Iterator[Line]:
    rest = f"(median), 99 % up to {longest.p99_tokens:,}, the longest {longest.most_tokens:,}"
    yield from row("Prompt and answer", f"{longest.p50_tokens:,} tokens", rest)
    rows = [_cut(cut) for cut in longest.by_length]
    yield from table(
        ("--max-model-len", "refused", "their tokens", "cut short", "tokens lost"), rows
    )


def _cut(cut: Cut) -> tuple[str, ...]:
    figures = (cut.refused, cut.refused_tokens, cut.cut, cut.cut_tokens)
    return (f"{cut.max_model_len:,}", *(f"{figure:,}" for figure in figures))


def _unused(pool: Unused, *, several: bool) -> Iterator[Line]:
    where = f" {pool.engine}.{pool.pool}" if several else ""
    yield from row(
        f"Never held{where}",
        f"{counted(pool.never_held, 'block')} of {pool.blocks:,}",
        f"{_bytes(pool.never_held_bytes)}requests never held more than {pool.held:,} at once",
    )
    if pool.never_taken:
        yield from row(
            f"Never taken{where}",
            counted(pool.never_taken, "block"),
            f"{_bytes(pool.never_taken_bytes)}held and cached ones were never more than "
            f"{pool.taken:,}",
        )


def _bytes(size: int | None) -> str:
    return "" if not size else f"{byte_size(size)} a GPU; "
