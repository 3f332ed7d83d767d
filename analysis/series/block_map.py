# SPDX-License-Identifier: Apache-2.0
"""What was each block doing, as far as its evictions tell?

The tables name blocks only where one is evicted. Each eviction tells what its block had been doing
since it was allocated: it was in use until its last holder let go of it, then kept its content for
reuse until it lost it. (Pauses between two uses count as use.) Of what was never evicted, blocks
that are free, or whose content is still there at the end, nothing is told.

A cell of the map is a few neighbouring blocks in a bin of time. What it counts is exact: block
seconds. With C(e) for the seconds before a bin's edge e that lie in intervals from a to b, which is
the sum of max(0, e - a) - max(0, e - b), the bin from e to f has C(f) - C(e) of them; so the
intervals need only be counted, and their ends summed up, by the bin that they fall into.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import polars as pl

from analysis.series.bins import Bins

COLUMNS = (
    "timestamp_sec",
    "lifetime_sec",
    "evictable_sec",
    "block_id",
    "engine",
    "pool",
)

ROWS = 160
"""Rows of the map at most; each is as many neighbouring blocks as that takes."""

_POOL = ("engine", "pool")
_CELL = (*_POOL, "row", "state", "bin")
_STATES = ("used", "kept")


@dataclass(frozen=True)
class BlockMap:
    """The pool with the most evictions: ``blocks_per_row`` neighbouring blocks a row, from block
    0 on, and one bin of time a column.

    ``used`` and ``kept``: of each cell's block seconds, the percentage in which a request held
    the block, and in which none did and its content could be reused. ``told_share``: the share
    of the pool's time that both cover, from 0 to 1.
    """

    engine: int
    pool: int
    blocks_per_row: int
    used: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    told_share: float


@dataclass
class Drawn:
    """The intervals seen so far. ``blocks``: block ids of a pool, by engine and pool."""

    bins: Bins
    blocks: dict[tuple[int, int], int]
    _ends: list[pl.DataFrame] = field(default_factory=list)
    _evictions: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def _blocks_per_row(self) -> int:
        return -(-max(self.blocks.values(), default=1) // ROWS)

    def add(self, batch: pl.DataFrame) -> None:
        evicted = pl.col("timestamp_sec")
        times = {
            "allocated": evicted - pl.col("lifetime_sec").fill_null(0.0),
            "released": evicted - pl.col("evictable_sec").fill_null(0.0),
            "evicted": evicted,
        }
        begin, end = self.bins.begin_sec, self.bins.end_sec
        for engine, pool, count in batch.group_by(_POOL).len().iter_rows():
            self._evictions[engine, pool] += count
        lived = batch.drop_nulls("block_id").select(
            *_POOL,
            row=pl.col("block_id") // self._blocks_per_row,
            **{name: time.clip(begin, end) for name, time in times.items()},
        )
        for state, since, until in (
            ("used", "allocated", "released"),
            ("kept", "released", "evicted"),
        ):
            for name, sign in ((since, 1), (until, -1)):
                self._ends.append(
                    lived.group_by(*_POOL, "row", self.bins.of(pl.col(name)))
                    .agg(count=sign * pl.len().cast(pl.Int64), moment=sign * pl.col(name).sum())
                    .with_columns(state=pl.lit(state))
                    .select(*_CELL, "count", "moment")
                )
        if len(self._ends) > 64:
            self._ends = [_summed(self._ends)]

    def result(self) -> BlockMap | None:
        """The map; None where no eviction tells of a block of a pool whose size is known."""
        known = [pool for pool in self._evictions if pool in self.blocks]
        if not known:
            return None
        engine, pool = max(known, key=lambda pool: (self._evictions[pool], -pool[0], -pool[1]))
        mine = (pl.col("engine") == engine) & (pl.col("pool") == pool)
        return self._map(engine, pool, _summed(self._ends).filter(mine))

    def _map(self, engine: int, pool: int, ends: pl.DataFrame) -> BlockMap:
        blocks, per_row = self.blocks[engine, pool], self._blocks_per_row
        rows = -(-blocks // per_row)
        edge = self.bins.begin_sec + (pl.col("bin") + 1) * self.bins.width_sec
        line = ("state", "row")
        seconds = (
            _every_cell(rows, self.bins.count)
            .join(ends, on=[*line, "bin"], how="left", maintain_order="left")
            .with_columns(pl.col("count", "moment").fill_null(0))
            .with_columns(pl.col("count", "moment").cum_sum().over(line))
            .with_columns(before_edge=edge * pl.col("count") - pl.col("moment"))
            .with_columns(
                sec=pl.col("before_edge") - pl.col("before_edge").shift(1, fill_value=0).over(line)
            )
        )
        capacity = per_row * self.bins.width_sec
        percent = (100 * pl.col("sec") / capacity).round().clip(0, 100).cast(pl.Int64)
        cells = seconds.with_columns(percent=percent)

        def of(state: str) -> tuple[tuple[int, ...], ...]:
            values = cells.filter(pl.col("state") == state)["percent"].to_list()
            width = self.bins.count
            return tuple(tuple(values[at : at + width]) for at in range(0, len(values), width))

        told = float(seconds["sec"].sum()) / (blocks * self.bins.width_sec * self.bins.count)
        return BlockMap(engine, pool, per_row, of("used"), of("kept"), min(told, 1.0))


def _every_cell(rows: int, bins: int) -> pl.DataFrame:
    return (
        pl.DataFrame({"state": _STATES})
        .join(pl.DataFrame({"row": range(rows)}, schema={"row": pl.Int64}), how="cross")
        .join(pl.DataFrame({"bin": range(bins)}, schema={"bin": pl.Int32}), how="cross")
    )


def _summed(ends: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(ends).group_by(_CELL).agg(pl.col("count", "moment").sum())
