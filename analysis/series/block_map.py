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

_MOMENTS = ("allocated", "released", "evicted")
_MERGED_AT = 16


@dataclass(frozen=True)
class BlockMap:
    """One pool: ``blocks_per_row`` neighbouring blocks a row, from block 0 on, and one bin of
    time a column.

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
class BlockMapTally:
    """The intervals seen so far of one pool, which has ``blocks`` block ids."""

    bins: Bins
    engine: int
    pool: int
    blocks: int
    _ends: dict[str, list[pl.DataFrame]] = field(
        default_factory=lambda: {moment: [] for moment in _MOMENTS}
    )

    @property
    def _blocks_per_row(self) -> int:
        return -(-self.blocks // ROWS)

    @property
    def _rows(self) -> int:
        return -(-self.blocks // self._blocks_per_row)

    def add(self, batch: pl.DataFrame) -> None:
        mine = (pl.col("engine") == self.engine) & (pl.col("pool") == self.pool)
        evicted = pl.col("timestamp_sec")
        times = {
            "allocated": evicted - pl.col("lifetime_sec").fill_null(0.0),
            "released": evicted - pl.col("evictable_sec").fill_null(0.0),
            "evicted": evicted,
        }
        row = (pl.col("block_id") // self._blocks_per_row).cast(pl.Int32)
        lived = batch.filter(mine, pl.col("block_id").is_between(0, self.blocks - 1)).select(
            row=row,
            **{name: at.clip(self.bins.begin_sec, self.bins.end_sec) for name, at in times.items()},
        )
        for moment, parts in self._ends.items():
            cell = pl.col("row") * self.bins.count + self.bins.of(pl.col(moment))
            parts.append(
                lived.group_by(cell=cell).agg(
                    count=pl.len().cast(pl.Int64), moment=pl.col(moment).sum()
                )
            )
            if len(parts) == _MERGED_AT:
                parts[:] = [_summed(parts)]

    def result(self) -> BlockMap | None:
        """The map; None where no eviction tells of a block of this pool."""
        ends = {name: _summed(parts) for name, parts in self._ends.items() if parts}
        if not ends or ends["evicted"].is_empty():
            return None
        since = {name: self._seconds_since(part) for name, part in ends.items()}
        used = since["allocated"] - since["released"]
        kept = since["released"] - since["evicted"]
        told = float((used + kept).sum())
        observed = self.blocks * self.bins.width_sec * self.bins.count
        return BlockMap(
            engine=self.engine,
            pool=self.pool,
            blocks_per_row=self._blocks_per_row,
            used=self._percent(used),
            kept=self._percent(kept),
            told_share=min(told / observed, 1.0),
        )

    def _seconds_since(self, ends: pl.DataFrame) -> pl.Series:
        """For each cell, row by row: the seconds of its bin that lie after these moments."""
        count = self.bins.count
        cells = pl.DataFrame({"cell": range(self._rows * count)}, schema={"cell": pl.Int32})
        edge = self.bins.begin_sec + (pl.col("cell") % count + 1) * self.bins.width_sec
        row = pl.col("cell") // count
        return (
            cells.join(ends, on="cell", how="left", maintain_order="left")
            .with_columns(pl.col("count", "moment").fill_null(0).cum_sum().over(row))
            .with_columns(before_edge=edge * pl.col("count") - pl.col("moment"))
            .select(
                pl.col("before_edge") - pl.col("before_edge").shift(1, fill_value=0.0).over(row)
            )
            .to_series()
        )

    def _percent(self, seconds: pl.Series) -> tuple[tuple[int, ...], ...]:
        capacity = self._blocks_per_row * self.bins.width_sec
        values = (100 * seconds / capacity).round().clip(0, 100).cast(pl.Int64).to_list()
        width = self.bins.count
        return tuple(tuple(values[at : at + width]) for at in range(0, len(values), width))


def _summed(ends: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(ends).group_by("cell").agg(pl.col("count", "moment").sum())
