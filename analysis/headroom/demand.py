# SPDX-License-Identifier: Apache-2.0
"""How many requests were in an engine at once, when they came and over time?

A request is in its engine from its arrival to its end, waiting or running. Only requests that have
ended are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import numpy as np
import polars as pl

from analysis.headroom.lives import Ints
from analysis.headroom.together import Floats
from analysis.pool.pressure import by_engine
from analysis.stats.quantiles import of_time
from analysis.tables.session import Session

TABLE = "requests"

_DAY_SEC = 86_400.0


@dataclass(frozen=True)
class Day:
    """A day of the session, from midnight to midnight in UTC. ``date``: None where the wall clock
    is not known; then days count from the session's beginning.

    ``requests``: that arrived. ``peak_requests``: the most that were in one engine at once, first
    at ``peak_sec`` of the session. ``p99_requests``: so many or fewer were in an engine for 99 %
    of the time in which any was.
    """

    date: str | None
    requests: int
    peak_requests: int
    peak_sec: float
    p99_requests: int


@dataclass(frozen=True)
class Demand:
    """``at_arrival``: for each request that arrived, how many were in its engine then, itself
    included. ``at_once`` and ``seconds``: how long how many requests were in an engine, all engines
    one after the other, times without any left out. ``per_sec``: arrivals a second in an engine,
    from the first to the last; None where no time lies between them. ``days``: with any request.
    """

    at_arrival: Ints
    at_once: Ints
    seconds: Floats
    per_sec: float | None
    days: tuple[Day, ...]


def measure(session: Session) -> Demand:
    """The requests of all engines of the session.

    Raises:
        SessionError: the table cannot be read.

    """
    rows = session.collect(
        TABLE,
        lambda table: table.select(
            pl.col("engine").fill_null(0), arrived=pl.col("timestamp") / 1e3, ended="finish_sec"
        ).drop_nulls(),
        history=True,
    )
    parts = [_of_engine(session, part) for part in by_engine(rows).values()]
    levels = pl.concat([part.levels for part in parts]) if parts else _NO_LEVELS
    arrived = np.sort(np.concatenate([part.arrived for part in parts] or [np.empty(0)]))
    span = float(arrived[-1] - arrived[0]) if len(arrived) else 0.0
    return Demand(
        at_arrival=np.concatenate([part.found for part in parts] or [np.empty(0, np.int64)]),
        at_once=levels["at_once"].to_numpy(),
        seconds=levels["seconds"].to_numpy(),
        per_sec=(len(arrived) - 1) / span / max(1, len(parts)) if span > 0 else None,
        days=tuple(_days(session, levels, arrived)),
    )


@dataclass(frozen=True)
class _Part:
    """One engine. ``arrived``: seconds of the session; ``found``: as ``Demand.at_arrival``.
    ``levels``: ``day``, ``from_sec``, ``at_once``, ``seconds``."""

    arrived: Floats
    found: Ints
    levels: pl.DataFrame


_NO_LEVELS = pl.DataFrame(
    schema={
        "day": pl.Int64,
        "from_sec": pl.Float64,
        "at_once": pl.Int64,
        "seconds": pl.Float64,
    }
)


def _of_engine(session: Session, rows: pl.DataFrame) -> _Part:
    arrived, ended = (np.sort(rows[name].to_numpy()) for name in ("arrived", "ended"))
    found = np.arange(1, len(arrived) + 1) - np.searchsorted(ended, arrived, side="right")
    counts = arrived >= session.begin_sec
    times = np.concatenate([ended, arrived, _midnights(session)])
    change = np.repeat([-1, 1, 0], [len(ended), len(arrived), len(times) - 2 * len(rows)])
    order = np.argsort(times, kind="stable")
    times = np.clip(times[order], session.begin_sec, None)
    levels = pl.DataFrame(
        {
            "day": _day(session, times[:-1]),
            "from_sec": times[:-1],
            "at_once": np.cumsum(change[order])[:-1],
            "seconds": np.diff(times),
        },
        schema=_NO_LEVELS.schema,
    ).filter(pl.col("at_once") > 0, pl.col("seconds") > 0)
    return _Part(arrived[counts], found[counts], levels)


def _began(session: Session) -> datetime | None:
    """The wall clock at second 0."""
    try:
        began = datetime.fromisoformat(
            str(session.metadata.get("started_at")).replace("Z", "+00:00")
        )
    except ValueError:
        return None
    return began if began.tzinfo else began.replace(tzinfo=timezone.utc)


def _into_day(session: Session) -> float:
    """Seconds from midnight to second 0."""
    began = _began(session)
    if began is None:
        return 0.0
    began = began.astimezone(timezone.utc)
    midnight = began.replace(hour=0, minute=0, second=0, microsecond=0)
    return (began - midnight).total_seconds()


def _day(session: Session, times: Floats) -> Ints:
    return ((times + _into_day(session)) // _DAY_SEC).astype(np.int64)


def _midnights(session: Session) -> Floats:
    into = _into_day(session)
    first, last = (int((sec + into) // _DAY_SEC) for sec in (session.begin_sec, session.end_sec))
    midnights: Floats = np.arange(first + 1, last + 1, dtype=np.float64) * _DAY_SEC - into
    return midnights


def _days(session: Session, levels: pl.DataFrame, arrived: Floats) -> Iterator[Day]:
    began, of_arrival = _began(session), _day(session, arrived)
    for (number,), rows in levels.sort("day", "from_sec").group_by("day", maintain_order=True):
        day = int(number)
        peak = rows.filter(pl.col("at_once") == pl.col("at_once").max()).row(0, named=True)
        times = rows.select("at_once", (pl.col("seconds") * 1e6).round().cast(pl.Int64)).rows()
        date = None
        if began is not None:
            date = (began.astimezone(timezone.utc) + timedelta(days=day)).date().isoformat()
        yield Day(
            date=date,
            requests=int((of_arrival == day).sum()),
            peak_requests=peak["at_once"],
            peak_sec=peak["from_sec"],
            p99_requests=int(of_time(times, 99) or 0),
        )
