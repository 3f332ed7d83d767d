# SPDX-License-Identifier: Apache-2.0
"""When did requests use each block, and when was it cached, as far as evictions show it?

The tables name a block only when it is evicted. An eviction shows what its block did since its
allocation: requests used it until its last holder let go of it, then it was cached. (Pauses
between two uses count as use.) Nothing is known of blocks that are free, or whose content is still
there at the end.

A cell of the map is some neighbouring blocks in one bin of time. It counts block-seconds exactly.
Let C(e) be the block-seconds of all intervals, from a to b, that lie before the edge e of a bin:
the sum of max(0, e - a) - max(0, e - b). Then the bin from e to f has C(f) - C(e) of them. So it is
enough to count the intervals, and to sum up their ends, by the bin in which they begin or end.
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
"""Rows of the map at most. Each row is as many neighbouring blocks as that takes."""

_MOMENTS = ("allocated", "released", "evicted")
_MERGED_AT = 16


@dataclass(frozen=True)
class BlockMap:
    """One pool: each row is ``blocks_per_row`` neighbouring blocks, from block 0 on, and each
    column a bin of time.

    ``used``: the percentage of a cell's block-seconds in which requests used the block. ``kept``:
    the percentage in which it was cached. ``known_share``: the share of the pool's block-seconds
    that both cover, from 0 to 1.
    """

    engine: int
    pool: int
    blocks_per_row: int
    used: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    known_share: float


@dataclass
class BlockMapTally:
    """Counts the intervals of one pool, which has ``blocks`` block ids."""

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
        """The map; None where no block of this pool was evicted."""
        ends = {name: _summed(parts) for name, parts in self._ends.items() if parts}
        if not ends or ends["evicted"].is_empty():
            return None
        since = {name: self._seconds_since(part) for name, part in ends.items()}
        used = since["allocated"] - since["released"]
        kept = since["released"] - since["evicted"]
        known = float((used + kept).sum())
        observed = self.blocks * self.bins.width_sec * self.bins.count
        return BlockMap(
            engine=self.engine,
            pool=self.pool,
            blocks_per_row=self._blocks_per_row,
            used=self._percent(used),
            kept=self._percent(kept),
            known_share=min(known / observed, 1.0),
        )

    def _seconds_since(self, ends: pl.DataFrame) -> pl.Series:
        """For each cell, row by row, the seconds of its bin that lie after these moments."""
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
