# SPDX-License-Identifier: Apache-2.0
"""How long did evicted blocks live, and how long had they not been used when they went?"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.stats.spread import Spread, spread

COLUMNS = ("lifetime_sec", "idle_sec", "evictable_sec")


@dataclass(frozen=True)
class Lifetimes:
    """Of every evicted block: ``lifetime`` from allocation to eviction, ``idle`` from the last
    allocation or reuse to eviction, ``evictable`` since its last holder let go (none where a
    holder had not)."""

    lifetime: Spread
    idle: Spread
    evictable: Spread


@dataclass
class LifetimeTally:
    """The values of kv_cache_evictions.csv seen so far: 12 bytes an eviction, as long as they are
    whole microseconds of little more than an hour, which is what the tables have."""

    parts: dict[str, list[pl.Series]] = field(
        default_factory=lambda: {column: [] for column in COLUMNS}
    )

    def add(self, batch: pl.DataFrame) -> None:
        micros = batch.select((pl.col(COLUMNS) * 1e6).round().cast(pl.UInt32, strict=False))
        for column, parts in self.parts.items():
            short, values = micros[column], batch[column]
            exact = _seconds(short).eq_missing(values).all()
            parts.append((short if exact else values).drop_nulls())

    def result(self) -> Lifetimes:
        return Lifetimes(*(self._spread(column) for column in COLUMNS))

    def _spread(self, column: str) -> Spread:
        parts = self.parts.pop(column)
        whole = [part for part in parts if part.dtype == pl.UInt32]
        others = [part for part in parts if part.dtype != pl.UInt32]
        micros = pl.concat([pl.Series(column, [], pl.UInt32), *whole])
        parts.clear()
        whole.clear()
        micros = micros.sort(in_place=True)
        parts = [_seconds(micros.slice(at, _SLICE)) for at in range(0, len(micros) + 1, _SLICE)]
        return spread(pl.concat([pl.concat(parts).set_sorted(), *others]))


_SLICE = 1_000_000


def _seconds(micros: pl.Series) -> pl.Series:
    """The very numbers that decimals of so many microseconds are read as."""
    # By one number Polars does not divide, but multiplies by its inverse, which is not exact.
    return micros / pl.repeat(1e6, len(micros), eager=True)
