# SPDX-License-Identifier: Apache-2.0
"""How long did evicted blocks live, and how long had they not been used when they went?"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.stats.histograms import Bin, of_sorted
from analysis.stats.quantiles import of_sample

COLUMNS = ("lifetime_sec", "idle_sec", "evictable_sec")


@dataclass(frozen=True)
class Spread:
    """A sample in seconds; every figure but ``count`` is None where it is empty.

    Quantiles are those of ``analysis.stats.quantiles.of_sample``, ``bins`` those of
    ``analysis.stats.histograms``.
    """

    count: int
    mean_sec: float | None
    p50_sec: float | None
    p90_sec: float | None
    p95_sec: float | None
    p99_sec: float | None
    max_sec: float | None
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Lifetimes:
    """Of every evicted block: ``lifetime`` from allocation to eviction, ``idle`` from the last
    allocation or reuse to eviction, ``evictable`` since its last holder let go (none where a
    holder had not)."""

    lifetime: Spread
    idle: Spread
    evictable: Spread


@dataclass
class Collected:
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


def spread(values: pl.Series) -> Spread:
    """The spread of these values, which it may leave sorted."""
    values = values.sort(in_place=True)
    if values.is_empty():
        return Spread(0, None, None, None, None, None, None, ())
    mean = float(values.mean())  # type: ignore[arg-type]
    p50, p90, p95, p99 = (of_sample(values, percent) for percent in (50, 90, 95, 99))
    return Spread(len(values), mean, p50, p90, p95, p99, values[-1], of_sorted(values))
