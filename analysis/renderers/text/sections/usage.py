# SPDX-License-Identifier: Apache-2.0
"""How full the KV cache was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple

from analysis.pool.usage import PoolState, PoolUsage, Usage
from analysis.renderers.text.layout import Line, label_cell, note, row, table
from analysis.wording.bands import BANDS
from analysis.wording.formats import percent, seconds, share

BAR = 24


def lines(usage: Usage, bar: str) -> Iterator[Line]:
    total = usage.combined
    if total is None:
        yield from note("No block was ever held.")
        return
    several = len(usage.pools) > 1
    if several:
        yield from note(f"All {len(usage.pools)} pools together; a second counts the same in each:")
    held = (
        f"{percent(total.mean_while_held_pct)} while any block was held, "
        f"{share(total.held_share)} of the time"
    )
    yield from row("Mean", percent(total.mean_pct), held)
    yield from row("Median, 95th pct.", f"{percent(total.p50_pct)}, {percent(total.p95_pct)}")
    at = f"at {seconds(total.peak.timestamp_sec)}: {_state(total.peak)}"
    yield from row("Peak", percent(total.peak_pct), at + _of_engine(total.peak, several))
    yield from row("At the end", percent(total.end.usage_pct), _state(total.end))
    yield from _bands(total, bar)
    if several:
        yield from _usage_by_pool(usage.pools)


def _bands(usage: PoolUsage, bar: str) -> Iterator[Line]:
    if usage.bands is None:
        return
    for name, part in zip(BANDS.values(), astuple(usage.bands), strict=True):
        label = f"Time {name}"
        length = round(part * BAR)
        yield (
            label_cell(label),
            (f"{share(part):>9}", "figure"),
            (f"  {bar * length}" if length else "", "bar"),
        )


def _usage_by_pool(pools: Sequence[PoolUsage]) -> Iterator[Line]:
    several_pools = any(usage.pool for usage in pools)
    differ = len({usage.end.total_blocks for usage in pools}) > 1
    rows = [
        (
            f"Engine {usage.engine}" + (f" pool {usage.pool}" if several_pools else ""),
            *([f"{usage.end.total_blocks:,}"] if differ else []),
            *map(percent, (usage.mean_pct, usage.p50_pct, usage.p95_pct, usage.peak_pct)),
            share(usage.bands.over_90 if usage.bands else None),
        )
        for usage in pools
    ]
    blocks = ["blocks"] if differ else []
    yield from table(("", *blocks, "mean", "median", "95th pct.", "peak", "over 90 %"), rows)


def _state(state: PoolState) -> str:
    return (
        f"{state.held_blocks:,} held, {state.cached_blocks:,} cached, "
        f"{state.free_blocks:,} free of {state.total_blocks:,}"
    )


def _of_engine(state: PoolState, several: bool) -> str:
    return f" on engine {state.engine}" if several else ""
