# SPDX-License-Identifier: Apache-2.0
"""What did the scheduler do in its steps, how long did requests wait, and how full was the pool?

Steps that scheduled nothing are counted apart. The requests are those that ended. Their times
count from their arrival at the engine, and are grouped by how full the pool was then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from analysis.pool.pressure import BANDS, States, band, by_engine, micros, with_states
from analysis.stats.quantiles import of_sample, of_time
from analysis.stats.spread import Spread, spread
from analysis.tables.phases import PHASE, PHASES
from analysis.tables.session import Session

STEPS = "scheduler_steps"
REQUESTS = "requests"

COLUMNS = (
    "engine",
    "timestamp_sec",
    "scheduled_tokens",
    "prefill_tokens",
    "decode_tokens",
    "scheduled_reqs",
    "preempted_reqs",
    "schedule_us",
    "repeats",
    "encoder_items",
    "encoder_tokens",
)


@dataclass(frozen=True)
class PerStep:
    """A figure of every step that scheduled tokens.

    A quantile is the smallest value that at least that share of the steps did not exceed.
    """

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class PhaseSteps:
    """The steps of one phase (``PHASES``). ``prefill_tokens`` and ``decode_tokens``: of all of them
    together. ``tokens``: of both kinds, in a step."""

    phase: str
    steps: int
    prefill_tokens: int
    decode_tokens: int
    tokens: PerStep


@dataclass(frozen=True)
class EncoderInputs:
    """What ``steps`` gave to the encoder of a multimodal model: ``items``, such as images, and the
    ``tokens`` that they became; None where that is not known of some."""

    steps: int
    items: int
    tokens: int | None


@dataclass(frozen=True)
class Pressure:
    """What happened while the pool's usage was in one ``band`` (``analysis.pool.usage.Bands``).

    ``steps``: those that scheduled tokens, with ``mean_requests`` and ``mean_tokens`` a step.
    ``preemptions``: of all steps. ``arrived``: requests that arrived then, with the quantiles of
    the time until their admission (``queued``) and until their first token, in seconds.
    """

    band: str
    steps: int
    mean_requests: float | None
    mean_tokens: float | None
    preemptions: int
    arrived: int
    queued_p50_sec: float | None
    queued_p95_sec: float | None
    first_token_p50_sec: float | None
    first_token_p95_sec: float | None


@dataclass(frozen=True)
class Scheduling:
    """``steps``: those that scheduled tokens. ``prefill_steps`` had tokens of prompts alone,
    ``decode_steps`` of answers alone, ``mixed_steps`` both. ``idle_steps`` scheduled nothing.

    ``requests`` and ``tokens``: in a step; ``schedule_us``: microseconds that ``schedule()`` took.
    These three are None without a step. ``queued``: from a request's arrival to its admission.
    ``first_token`` and ``finish``: from its arrival to its first token and to its end, as the
    engine saw them. ``by_pressure``: the bands in which anything happened, the emptiest first.
    ``by_phase``: the phases that had a step, as ``PHASES`` has them. ``encoder``: None where no
    step gave anything to an encoder.
    """

    steps: int
    prefill_steps: int
    mixed_steps: int
    decode_steps: int
    idle_steps: int
    requests: PerStep | None
    tokens: PerStep | None
    schedule_us: PerStep | None
    queued: Spread
    first_token: Spread
    finish: Spread
    by_pressure: tuple[Pressure, ...]
    by_phase: tuple[PhaseSteps, ...]
    encoder: EncoderInputs | None


def measure(session: Session, pools: States) -> Scheduling:
    """The steps and requests of all engines of the session.

    Raises:
        SessionError: a table cannot be read.

    """
    tally = SchedulingTally(session, pools)
    for batch in session.batches(STEPS, COLUMNS):
        tally.add(batch)
    return tally.result()


class SchedulingTally:
    """Counts how many steps had each value of each figure."""

    figures = ("scheduled_reqs", "scheduled_tokens", "schedule_us")

    def __init__(self, session: Session, pools: States) -> None:
        self._session, self._pools = session, pools
        self._idle = 0
        self._values: dict[str, list[pl.DataFrame]] = {name: [] for name in self.figures}
        self._bands: list[pl.DataFrame] = []
        self._phases: list[pl.DataFrame] = []
        self._encoded: list[pl.DataFrame] = []

    def add(self, batch: pl.DataFrame) -> None:
        busy = (pl.col("scheduled_tokens") > 0).fill_null(False)
        self._idle += int(batch.filter(~busy).select(pl.col("repeats").fill_null(1).sum()).item())
        self._bands.append(_by_band(batch.with_columns(micros("timestamp_sec")), self._pools, busy))
        rows = batch.filter(busy)
        self._phases.append(_by_phase(rows))
        self._encoded.append(_encoded(rows))
        for name, parts in self._values.items():
            parts.append(rows.group_by(pl.col(name).cast(pl.Int64).alias("value")).len())

    def result(self) -> Scheduling:
        """The figures of the steps, and of the session's requests.

        Raises:
            SessionError: requests.jsonl cannot be read.

        """
        phases = self._by_phase()
        steps = {each.phase: each.steps for each in phases}
        bands = {row["band"]: row for row in _added(self._bands, "band").iter_rows(named=True)}
        waits = _waits(self._session, self._pools)
        return Scheduling(
            steps=sum(steps.values()),
            prefill_steps=steps.get("prefill", 0),
            mixed_steps=steps.get("mixed", 0),
            decode_steps=steps.get("decode", 0),
            idle_steps=self._idle,
            requests=self._per_step("scheduled_reqs"),
            tokens=self._per_step("scheduled_tokens"),
            schedule_us=self._per_step("schedule_us"),
            queued=spread(waits["queued"].drop_nulls()),
            first_token=spread(waits["first_token"].drop_nulls()),
            finish=spread(waits["finish"].drop_nulls()),
            by_pressure=tuple(
                _pressure(name, bands.get(position, {}), arrived)
                for position, name in enumerate(BANDS)
                for arrived in [waits.filter(pl.col("band") == position)]
                if position in bands or arrived.height
            ),
            by_phase=phases,
            encoder=self._encoder(),
        )

    def _per_step(self, name: str) -> PerStep | None:
        values = _added(self._values[name], "value").drop_nulls().sort("value").rows()
        return _spread_of(values) if values else None

    def _by_phase(self) -> tuple[PhaseSteps, ...]:
        if not self._phases:
            return ()
        counts = pl.concat(self._phases).group_by("phase", "tokens").agg(pl.all().sum())
        found = counts.sort("tokens").partition_by("phase", as_dict=True)
        return tuple(
            PhaseSteps(
                phase=phase,
                steps=int(rows["steps"].sum()),
                prefill_tokens=int(rows["prefill"].sum()),
                decode_tokens=int(rows["decode"].sum()),
                tokens=_spread_of(rows.select("tokens", "steps").rows()),
            )
            for phase in PHASES
            if (rows := found.get((phase,))) is not None
        )

    def _encoder(self) -> EncoderInputs | None:
        if not self._encoded:
            return None
        steps, items, tokens, unknown = pl.concat(self._encoded).sum().row(0)
        return EncoderInputs(steps, items, None if unknown else tokens) if steps else None


def _spread_of(values: Sequence[tuple[int, int]]) -> PerStep:
    """Of values with how many steps had them, in ascending order."""
    steps = sum(count for _, count in values)
    p50, p95, p99 = (of_time(values, percent) or 0 for percent in (50, 95, 99))
    mean = sum(value * count for value, count in values) / steps
    return PerStep(mean, p50, p95, p99, values[-1][0])


def _by_phase(steps: pl.DataFrame) -> pl.DataFrame:
    """How many steps of each phase had so many tokens, and the sums of their tokens."""
    return (
        steps.drop_nulls("scheduled_tokens")
        .group_by(PHASE.alias("phase"), tokens=pl.col("scheduled_tokens").cast(pl.Int64))
        .agg(
            steps=pl.len().cast(pl.Int64),
            prefill=pl.col("prefill_tokens").sum().cast(pl.Int64),
            decode=pl.col("decode_tokens").sum().cast(pl.Int64),
        )
    )


def _encoded(steps: pl.DataFrame) -> pl.DataFrame:
    """Steps that gave something to an encoder, their items, the tokens of these, and steps of which
    the tokens are not known."""
    busy = steps.filter(pl.col("encoder_items") > 0)
    return busy.select(
        steps=pl.len().cast(pl.Int64),
        items=pl.col("encoder_items").sum().cast(pl.Int64),
        tokens=pl.col("encoder_tokens").sum().cast(pl.Int64),
        unknown=pl.col("encoder_tokens").null_count().cast(pl.Int64),
    )


def _by_band(steps: pl.DataFrame, pools: States, busy: pl.Expr) -> pl.DataFrame:
    """Sums of the steps by the band of the pool after each had been scheduled."""
    return (
        _with_band(steps, pools)
        .group_by("band")
        .agg(
            steps=busy.sum().cast(pl.Int64),
            requests=pl.col("scheduled_reqs").sum(),
            tokens=pl.col("scheduled_tokens").sum(),
            preemptions=pl.col("preempted_reqs").sum(),
        )
    )


def _with_band(rows: pl.DataFrame, pools: States) -> pl.DataFrame:
    """The rows with the band of their engine's pool, which is empty before its first state."""
    usage = pl.col("usage_pct").fill_null(0)
    parts = [
        with_states(part.sort("micros"), pools.of(engine)).with_columns(band=band(usage))
        for engine, part in by_engine(rows).items()
    ]
    return pl.concat(parts) if parts else rows.with_columns(band=pl.lit(None, pl.Int32))


def _added(parts: list[pl.DataFrame], key: str) -> pl.DataFrame:
    if not parts:
        return pl.DataFrame(schema=[key, "len"])
    return pl.concat(parts).group_by(key).agg(pl.exclude(key).sum())


def _waits(session: Session, pools: States) -> pl.DataFrame:
    """A row for each request that ended: its band, and its times in seconds since its arrival."""
    arrived = pl.col("timestamp") / 1e3
    requests = session.collect(
        REQUESTS,
        lambda table: table.select(
            "engine",
            micros("timestamp", 1e-3),
            queued=pl.col("queue_sec"),
            first_token=(pl.col("first_token_sec") - arrived).clip(0),
            finish=(pl.col("finish_sec") - arrived).clip(0),
        ),
    )
    return _with_band(requests, pools)


def _pressure(name: str, steps: Mapping[str, int], arrived: pl.DataFrame) -> Pressure:
    count = steps.get("steps", 0)
    queued, first = (arrived[column].drop_nulls().sort() for column in ("queued", "first_token"))
    return Pressure(
        band=name,
        steps=count,
        mean_requests=steps["requests"] / count if count else None,
        mean_tokens=steps["tokens"] / count if count else None,
        preemptions=steps.get("preemptions", 0),
        arrived=arrived.height,
        queued_p50_sec=of_sample(queued, 50),
        queued_p95_sec=of_sample(queued, 95),
        first_token_p50_sec=of_sample(first, 50),
        first_token_p95_sec=of_sample(first, 95),
    )
