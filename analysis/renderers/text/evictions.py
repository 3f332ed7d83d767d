# SPDX-License-Identifier: Apache-2.0
"""What was evicted, and how long it had lived."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.evictions import Evicted, Evictions
from analysis.lifetimes import Lifetimes, Spread
from analysis.renderers.formats import seconds
from analysis.renderers.text.layout import Line, note, table


def lines(evictions: Evictions, lifetimes: Lifetimes) -> Iterator[Line]:
    if not evictions.total.blocks:
        yield from note("No cached block was evicted.")
        return
    split = [*evictions.by_reason.items(), *evictions.by_origin.items()]
    rows = [
        _evicted("All", evictions.total),
        *(_evicted(name.capitalize(), evicted) for name, evicted in split),
    ]
    if len(evictions.by_engine) > 1:
        rows += [_evicted(f"Engine {rank}", part) for rank, part in evictions.by_engine.items()]
    yield from table(("", "blocks", "never reused", "copies left"), rows)
    yield from note(
        "Never reused: no request ever found the block. Copies left: another block still held "
        "the same content, so nothing was lost."
    )
    yield ()
    rows = [_spread("Lifetime", lifetimes.lifetime), _spread("Idle before", lifetimes.idle)]
    yield from table(("", "mean", "median", "95th pct.", "99th pct.", "max"), rows)


def _evicted(name: str, evicted: Evicted) -> tuple[str, ...]:
    def of_all(blocks: int) -> str:
        return f"{blocks:,} ({100 * blocks / evicted.blocks:.1f} %)"

    return (
        name,
        f"{evicted.blocks:,}",
        of_all(evicted.never_reused),
        of_all(evicted.copies_left),
    )


def _spread(name: str, spread: Spread) -> tuple[str, ...]:
    figures = (spread.mean_sec, spread.p50_sec, spread.p95_sec, spread.p99_sec, spread.max_sec)
    return (name, *map(seconds, figures))
