# SPDX-License-Identifier: Apache-2.0
"""How full was the KV cache, and for how long?

Every figure is weighted by time. A row of kv_cache_usage.csv holds until the next row of the same
engine and pool, the last one until the session's end. Neither the time before an engine's first
row nor the warm-up counts; the state at the end of the warm-up counts from there on. For several
engines or pools there is also one distribution of all of them, in which a second of each counts
the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from analysis.stats.quantiles import of_time
from analysis.tables.session import Session

TABLE = "kv_cache_usage"

_STATE = (
    "timestamp_sec",
    "usage_pct",
    "num_blocks",
    "cached_blocks",
    "free_blocks",
    "total_blocks",
)
_POOL = ("engine", "pool")


@dataclass(frozen=True)
class PoolState:
    """The blocks of a pool at one moment; of all pools where ``engine`` and ``pool`` are None."""

    engine: int | None
    pool: int | None
    timestamp_sec: float
    usage_pct: float
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    total_blocks: int


@dataclass(frozen=True)
class Bands:
    """The share of the time, from 0 to 1, that usage spent in each of five bands.

    A band includes its lower bound and not its upper one. 90 % itself is the exception: it is not
    over 90 %.
    """

    under_40: float
    from_40_to_60: float
    from_60_to_80: float
    from_80_to_90: float
    over_90: float


@dataclass(frozen=True)
class PoolUsage:
    """The usage of one pool, or of all of them where ``engine`` and ``pool`` are None.

    ``observed_sec``: the time that counts. ``mean_pct``, ``p50_pct``, ``p95_pct`` and
    ``peak_pct``: in percent of the pool's blocks. ``held_share``: the share of the time in which
    a request held any block, from 0 to 1; ``mean_while_held_pct``: the mean over that time.
    ``peak``: the first moment of the highest usage. ``end``: the state after the last change, and
    when that was (not before the end of the warm-up). Means, quantiles, ``bands`` and
    ``held_share`` are None where no time passed.
    """

    engine: int | None
    pool: int | None
    observed_sec: float
    mean_pct: float | None
    p50_pct: float | None
    p95_pct: float | None
    peak_pct: float
    bands: Bands | None
    held_share: float | None
    mean_while_held_pct: float | None
    peak: PoolState
    end: PoolState


@dataclass(frozen=True)
class Usage:
    """``pools``: sorted by engine and pool. ``combined``: all of them, None without any row."""

    combined: PoolUsage | None
    pools: tuple[PoolUsage, ...]

    @property
    def observed_sec(self) -> float | None:
        """Seconds since the first row of any engine; None without a row."""
        return max((pool.observed_sec for pool in self.pools), default=None)


def blocks_by_engine(usage: Usage) -> dict[int, int]:
    """Blocks that requests can hold in the first pool of each engine that has a row."""
    return {
        pool.engine: pool.end.total_blocks
        for pool in usage.pools
        if pool.engine is not None and not pool.pool
    }


def measure(session: Session) -> Usage:
    """The usage of every pool of the session, in one pass over the table.

    Raises:
        SessionError: the table cannot be read.

    """
    levels: list[pl.DataFrame] = []
    peaks: pl.DataFrame | None = None
    last: pl.DataFrame | None = None
    for batch in session.batches(TABLE, [*_STATE, *_POOL], history=True):
        rows = batch if last is None else pl.concat([last, batch])
        held = _held(rows, session.begin_sec)
        levels.append(_time_at_levels(held))
        if len(levels) == 64:
            levels = [_merged(levels)]
        peaks = _highest(held if peaks is None else pl.concat([peaks, held]))
        last = rows.group_by(_POOL, maintain_order=True).last().select(batch.columns)
    if last is None or peaks is None:
        return Usage(None, ())
    until_end = last.with_columns(timestamp_sec=pl.lit(session.end_sec))
    held = _held(pl.concat([last, until_end]), session.begin_sec)
    levels.append(_time_at_levels(held))
    return _usage(_merged(levels), _highest(pl.concat([peaks, held])), held)


def _held(rows: pl.DataFrame, begin_sec: float) -> pl.DataFrame:
    """The states that held at any moment from ``begin_sec`` on, and ``until`` when.

    The last row of each pool only ends the one before it.
    """
    until = pl.col("timestamp_sec").shift(-1).over(_POOL)
    return (
        rows.with_columns(until=until)
        .filter((pl.col("timestamp_sec") >= begin_sec) | (pl.col("until") > begin_sec))
        .drop_nulls("until")
        .with_columns(pl.col("timestamp_sec").clip(begin_sec))
    )


def _time_at_levels(held: pl.DataFrame) -> pl.DataFrame:
    """How long each pool was at each usage, in microseconds."""
    begin, until = ((pl.col(at) * 1e6).round().cast(pl.Int64) for at in ("timestamp_sec", "until"))
    return (
        held.lazy()
        .group_by(*_POOL, "usage_pct", held=pl.col("num_blocks") > 0)
        .agg(micros=(until - begin).clip(0).sum())
        .collect()
    )


def _merged(levels: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(levels).group_by(*_POOL, "usage_pct", "held").agg(pl.col("micros").sum())


def _highest(rows: pl.DataFrame) -> pl.DataFrame:
    """The first row of each pool's highest usage."""
    highest = pl.col("usage_pct") == pl.col("usage_pct").max().over(_POOL)
    return rows.filter(highest).unique(_POOL, keep="first", maintain_order=True)


def _usage(levels: pl.DataFrame, peaks: pl.DataFrame, ending: pl.DataFrame) -> Usage:
    ends, highest, times = _by_pool(ending), _by_pool(peaks), _by_pool(levels)
    pools = tuple(
        _pool_usage(engine, pool, times[engine, pool], _state(highest[engine, pool]), _state(end))
        for (engine, pool), end in sorted(ends.items())
    )
    peak = max((usage.peak for usage in pools), key=lambda state: state.usage_pct)
    end = _sum([usage.end for usage in pools])
    return Usage(_pool_usage(None, None, levels, peak, end), pools)


def _by_pool(frame: pl.DataFrame) -> dict[tuple[int, int], pl.DataFrame]:
    return {(int(key[0]), int(key[1])): part for key, part in frame.group_by(_POOL)}


def _pool_usage(
    engine: int | None, pool: int | None, levels: pl.DataFrame, peak: PoolState, end: PoolState
) -> PoolUsage:
    times = levels.select("usage_pct", "micros").rows()
    total = sum(micros for _, micros in times)
    held = levels.filter("held").select("usage_pct", "micros").rows()
    held_total = sum(micros for _, micros in held)
    return PoolUsage(
        engine=engine,
        pool=pool,
        observed_sec=total / 1e6,
        mean_pct=_mean(times, total),
        p50_pct=of_time(times, 50),
        p95_pct=of_time(times, 95),
        peak_pct=peak.usage_pct,
        bands=_bands(times, total),
        held_share=held_total / total if total else None,
        mean_while_held_pct=_mean(held, held_total),
        peak=peak,
        end=end,
    )


def _mean(times: Iterable[tuple[float, int]], total: int) -> float | None:
    return sum(usage * micros for usage, micros in times) / total if total else None


def _bands(times: Iterable[tuple[float, int]], total: int) -> Bands | None:
    if not total:
        return None
    bands = [0] * 5
    for usage, micros in times:
        bands[4 if usage > 90 else sum(usage >= floor for floor in (40, 60, 80))] += micros
    return Bands(*(micros / total for micros in bands))


def _state(row: pl.DataFrame) -> PoolState:
    values = row.row(0, named=True)
    return PoolState(
        engine=values["engine"],
        pool=values["pool"],
        timestamp_sec=values["timestamp_sec"],
        usage_pct=values["usage_pct"],
        held_blocks=values["num_blocks"],
        cached_blocks=values["cached_blocks"],
        free_blocks=values["free_blocks"],
        total_blocks=values["total_blocks"],
    )


def _sum(states: list[PoolState]) -> PoolState:
    """All pools as one. Its usage is the share of all their blocks."""
    if len(states) == 1:
        return states[0]
    held = sum(state.held_blocks for state in states)
    total = sum(state.total_blocks for state in states)
    return PoolState(
        engine=None,
        pool=None,
        timestamp_sec=max(state.timestamp_sec for state in states),
        usage_pct=round(100 * held / total, 2) if total else 0.0,
        held_blocks=held,
        cached_blocks=sum(state.cached_blocks for state in states),
        free_blocks=sum(state.free_blocks for state in states),
        total_blocks=total,
    )
