# SPDX-License-Identifier: Apache-2.0
"""How full were the pools, and how many requests ran and waited, over time?

A row of kv_cache_usage.csv holds until the next row of its engine and pool, the last one until the
session's end. The mean of a bin is weighted by that time. Its lowest and highest value are those of
any moment in it, so that a chart of a day still shows a peak of one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from analysis.series.bins import Bins
from analysis.tables.session import Session

TABLE = "kv_cache_usage"

_POOL = ("engine", "pool")
_BLOCKS = ("num_blocks", "cached_blocks", "free_blocks")
_LEVELS = ("usage_pct", "running_reqs", "waiting_reqs")
_VALUES = (*_BLOCKS, *_LEVELS)
_COLUMNS = ("timestamp_sec", *_POOL, *_VALUES)

Values = tuple[float | None, ...]
"""One value for each bin; None where nothing is known."""


@dataclass(frozen=True)
class Level:
    """A quantity over time, one value for each bin, None before the first row of any pool.

    ``mean``: weighted by time, each pool with the same weight. ``low`` and ``high``: of any pool at
    any moment of the bin.
    """

    mean: Values
    low: Values
    high: Values


@dataclass(frozen=True)
class PoolSeries:
    """The pools over time. ``pools``: how many there are.

    ``held``, ``cached`` and ``free``: blocks of all pools together, the mean of each bin.
    ``usage``: in percent of a pool's blocks. ``running`` and ``waiting``: requests of an engine.
    """

    pools: int
    held: Values
    cached: Values
    free: Values
    usage: Level
    running: Level
    waiting: Level


def measure(session: Session, bins: Bins) -> PoolSeries:
    """The states of all pools over time.

    Raises:
        SessionError: the table cannot be read.

    """
    sums = list(_sums(session, bins))
    if not sums:
        nothing: Values = (None,) * bins.count
        level = Level(nothing, nothing, nothing)
        return PoolSeries(0, nothing, nothing, nothing, level, level, level)
    by_pool = _merged(sums).with_columns(
        pl.when(pl.col("sec") > 0).then(pl.col(f"{value}_sum") / pl.col("sec")).alias(value)
        for value in _VALUES
    )
    by_bin = bins.dense(
        by_pool.group_by("bin").agg(
            *(_sum_of_known(value) for value in _BLOCKS),
            *(pl.col(value).mean() for value in _LEVELS),
            *(pl.col(f"{value}_low").min() for value in _LEVELS),
            *(pl.col(f"{value}_high").max() for value in _LEVELS),
        )
    )

    def values(column: str) -> Values:
        return tuple(by_bin[column].to_list())

    held, cached, free = (values(column) for column in _BLOCKS)
    usage, running, waiting = (
        Level(values(column), values(f"{column}_low"), values(f"{column}_high"))
        for column in _LEVELS
    )
    pools = by_pool.select(_POOL).n_unique()
    return PoolSeries(pools, held, cached, free, usage, running, waiting)


def _sums(session: Session, bins: Bins) -> Iterator[pl.DataFrame]:
    last: pl.DataFrame | None = None
    for batch in session.batches(TABLE, _COLUMNS, history=True):
        rows = batch if last is None else pl.concat([last, batch])
        yield _summed(_by_bin(rows, bins))
        last = rows.group_by(_POOL, maintain_order=True).last().select(_COLUMNS)
    if last is not None:
        until_end = last.with_columns(timestamp_sec=pl.lit(session.end_sec))
        yield _summed(_by_bin(pl.concat([last, until_end]), bins))


def _by_bin(rows: pl.DataFrame, bins: Bins) -> pl.DataFrame:
    """The states that held between these rows, cut at the edges of the bins."""
    spans = rows.group_by(_POOL).agg(
        first=pl.col("timestamp_sec").min(), last=pl.col("timestamp_sec").max()
    )
    edges = pl.DataFrame({"timestamp_sec": bins.edges})
    cuts = (
        spans.join(edges, how="cross")
        .filter(pl.col("timestamp_sec").is_between("first", "last"))
        .drop("first", "last")
    )
    until = pl.col("timestamp_sec").shift(-1).over(_POOL)
    middle = (pl.col("timestamp_sec") + pl.col("until")) / 2
    return (
        pl.concat([rows, cuts], how="diagonal")
        .sort(*_POOL, "timestamp_sec", maintain_order=True)
        .with_columns(pl.col(_VALUES).forward_fill().over(_POOL), until=until)
        .filter(middle.is_between(bins.begin_sec, bins.end_sec))
        .with_columns(bins.of(middle), sec=pl.col("until") - pl.col("timestamp_sec"))
    )


def _summed(states: pl.DataFrame) -> pl.DataFrame:
    return states.group_by(*_POOL, "bin").agg(
        pl.col("sec").sum(),
        *((pl.col(value) * pl.col("sec")).sum().alias(f"{value}_sum") for value in _VALUES),
        *(pl.col(value).min().cast(pl.Float64).alias(f"{value}_low") for value in _LEVELS),
        *(pl.col(value).max().cast(pl.Float64).alias(f"{value}_high") for value in _LEVELS),
    )


def _merged(sums: list[pl.DataFrame]) -> pl.DataFrame:
    return (
        pl.concat(sums)
        .group_by(*_POOL, "bin")
        .agg(
            pl.col("sec").sum(),
            *(pl.col(f"{value}_sum").sum() for value in _VALUES),
            *(pl.col(f"{value}_low").min() for value in _LEVELS),
            *(pl.col(f"{value}_high").max() for value in _LEVELS),
        )
    )


def _sum_of_known(value: str) -> pl.Expr:
    """The sum over the pools; null, and not 0, before the first row of any."""
    return pl.when(pl.col(value).count() > 0).then(pl.col(value).sum()).alias(value)
