# SPDX-License-Identifier: Apache-2.0
"""What was evicted, why, and was it a loss?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

TABLE = "kv_cache_evictions"
COLUMNS = ("reason", "origin", "reuse_count", "copies_left", "engine")
_KEYS = ("engine", "reason", "origin")


@dataclass(frozen=True)
class Evicted:
    """Cached blocks that lost their content.

    ``never_reused``: no request ever found them (their reuse_count is 0). ``copies_left``: other
    blocks still held the same content, so nothing was lost.
    """

    blocks: int
    never_reused: int
    copies_left: int


@dataclass(frozen=True)
class Evictions:
    """All evictions, and the same by reason, by what the content was, and by engine."""

    total: Evicted
    by_reason: Mapping[str, Evicted]
    by_origin: Mapping[str, Evicted]
    by_engine: Mapping[int, Evicted]


@dataclass
class Counted:
    """The evictions seen so far, summed up."""

    sums: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        self.sums.append(
            batch.group_by(_KEYS).agg(
                blocks=pl.len().cast(pl.Int64),
                never_reused=(pl.col("reuse_count") == 0).sum().cast(pl.Int64),
                copies_left=(pl.col("copies_left") > 0).sum().cast(pl.Int64),
            )
        )
        if len(self.sums) == 64:
            self.sums = [_summed(pl.concat(self.sums), _KEYS)]

    def result(self) -> Evictions:
        if not self.sums:
            return Evictions(Evicted(0, 0, 0), {}, {}, {})
        sums = pl.concat(self.sums)
        total = sums.select("blocks", "never_reused", "copies_left").sum().row(0)
        return Evictions(
            total=Evicted(*total),
            by_reason=_split(sums, "reason"),
            by_origin=_split(sums.with_columns(pl.col("origin").fill_null("unknown")), "origin"),
            by_engine=dict(sorted(_split(sums, "engine").items())),
        )


def _summed(sums: pl.DataFrame, keys: tuple[str, ...]) -> pl.DataFrame:
    return sums.group_by(keys).agg(pl.col("blocks", "never_reused", "copies_left").sum())


def _split(sums: pl.DataFrame, key: str) -> dict[Any, Evicted]:
    rows = _summed(sums, (key,)).sort("blocks", key, descending=[True, False])
    return {row[0]: Evicted(*row[1:]) for row in rows.iter_rows()}
