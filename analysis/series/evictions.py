# SPDX-License-Identifier: Apache-2.0
"""How fast were cached blocks evicted, and why?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from analysis.series.bins import Bins

COLUMNS = ("timestamp_sec", "reason")

_PARTS = 10


@dataclass(frozen=True)
class EvictionRate:
    """Blocks evicted a second. ``mean``: over each bin, by reason. ``busiest``: for all reasons, in
    the busiest of ``parts`` equal parts of each bin. A part is a second long at least; a shorter
    bin is one part."""

    mean: Mapping[str, tuple[float, ...]]
    busiest: tuple[float, ...]
    parts: int


@dataclass
class EvictionRateTally:
    """Counts evictions by reason and part of a bin."""

    bins: Bins
    _rates: list[pl.DataFrame] = field(default_factory=list)

    @property
    def parts(self) -> int:
        return max(1, min(_PARTS, int(self.bins.width_sec)))

    def add(self, batch: pl.DataFrame) -> None:
        part = self.bins.finer(self.parts).of(pl.col("timestamp_sec")).alias("part")
        self._rates.append(batch.group_by("reason", part).agg(blocks=pl.len().cast(pl.Int64)))

    def result(self) -> EvictionRate:
        parts, width = self.parts, self.bins.width_sec
        if not self._rates:
            return EvictionRate({}, (0.0,) * self.bins.count, parts)
        counts = (
            pl.concat(self._rates)
            .group_by("reason", "part")
            .agg(pl.col("blocks").sum())
            .with_columns(bin=pl.col("part") // parts)
        )
        by_reason = counts.group_by("reason", "bin").agg(pl.col("blocks").sum() / width)
        busiest = (
            counts.group_by("bin", "part")
            .agg(pl.col("blocks").sum() / (width / parts))
            .group_by("bin")
            .agg(pl.col("blocks").max())
        )
        totals = counts.group_by("reason").agg(pl.col("blocks").sum())
        reasons = totals.sort("blocks", "reason", descending=[True, False])["reason"]
        return EvictionRate(
            mean={
                reason: self._dense(by_reason.filter(pl.col("reason") == reason).drop("reason"))
                for reason in reasons
            },
            busiest=self._dense(busiest),
            parts=parts,
        )

    def _dense(self, by_bin: pl.DataFrame) -> tuple[float, ...]:
        return tuple(self.bins.dense(by_bin)["blocks"].fill_null(0.0).to_list())
