# SPDX-License-Identifier: Apache-2.0
"""Why did requests wait, and were blocks free meanwhile?

All requests that still wait at the end of a ``schedule()`` wait for one reason: the rule that made
the scheduler stop admitting (``analysis.requests.waiting_rules``). The reason holds until the
next step of the engine. It is exact where the step's row, the pool's state and the lookup of the
request at the head of the queue decide it. The rest is inferred, as ``docs/concepts.md`` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from analysis.pool.pressure import States, by_engine, micros, with_states
from analysis.pool.usage import Usage
from analysis.requests.waiting_rules import Rules
from analysis.tables.facts import Facts
from analysis.tables.session import Session

TABLE = "scheduler_steps"

COLUMNS = (
    "engine",
    "timestamp_sec",
    "running_reqs",
    "waiting_reqs",
    "scheduled_tokens",
    "scheduled_reqs",
    "preempted_reqs",
    "schedule_us",
    "repeats",
)


@dataclass(frozen=True)
class Reason:
    """``request_sec``: requests that waited for this reason, times seconds; ``share``: of all
    waiting, from 0 to 1. ``usage_pct``: usage of the pool meanwhile, in percent, as a mean over
    ``request_sec``; None where it is not known.
    """

    request_sec: float
    share: float
    usage_pct: float | None


@dataclass(frozen=True)
class Waiting:
    """``request_sec``: all waiting, as requests times seconds. ``waited_sec``: the time in which a
    request waited, summed over the engines. ``most``: the most requests that waited at once in an
    engine. ``by_reason``, the largest first ("the head" is the request at the head of the queue):

    ``preempting``: the step preempted a request, and so admitted none.
    ``token_budget``: the step gave all its tokens out.
    ``max_num_seqs``: as many requests ran as may.
    ``never_fits``: the head needs more blocks than the pool has.
    ``no_blocks``: the next chunk of the head had no room.
    ``whole_prompt``: the next chunk of the head had room, and its whole prompt had none.
    ``watermark``: the prompt had room only in the blocks that stay free for running requests.
    ``blocks``: one of these three; which one is not known (several KV cache groups).
    ``no_chunking``: the prompt is longer than what was left of the step, and must not be cut up.
    ``lora``: as many adapters ran as may.
    ``connector``: the head waited for the KV connector.
    ``paused``: no request ran, and none was looked up: the engine was paused, or no waiting
    request was ready (a grammar, a client that streams its input, results still in flight).
    ``not_known``: none of these.
    """

    request_sec: float
    waited_sec: float
    most: int
    by_reason: Mapping[str, Reason]


def measure(session: Session, facts: Facts, usage: Usage, pools: States) -> Waiting:
    """The waiting of all engines of the session.

    Raises:
        SessionError: a table cannot be read.

    """
    tally = WaitingTally(session, facts, usage, pools)
    for batch in session.batches(TABLE, COLUMNS, history=True):
        tally.add(batch)
    return tally.result()


class WaitingTally:
    """Sums the waiting up by reason. It needs all steps, those in the warm-up included."""

    def __init__(self, session: Session, facts: Facts, usage: Usage, pools: States) -> None:
        self._rules = Rules.of(facts, usage)
        self._begin, self._end = round(session.begin_sec * 1e6), round(session.end_sec * 1e6)
        self._pools = pools
        self._heads = by_engine(_refused_heads(session))
        self._adapters = by_engine(_adapters(session)) if facts.scheduler.max_loras else {}
        # Without prefix caching there are no lookups to show which request was at the head.
        without_lookups = facts.prefix_caching is False
        self._admissions = by_engine(_admissions(session)) if without_lookups else {}
        self._engines: dict[int, _Engine] = {}
        self._parts: list[pl.DataFrame] = []

    def add(self, batch: pl.DataFrame) -> None:
        for rank, steps in by_engine(batch.select(COLUMNS)).items():
            if rank not in self._engines:
                self._engines[rank] = self._engine(rank)
            self._parts.append(self._engines[rank].add(_timed(steps)))

    def result(self) -> Waiting:
        engines = list(self._engines.values())
        return _result([*self._parts, *(each.close(self._end) for each in engines)], engines)

    def _engine(self, rank: int) -> _Engine:
        return _Engine(
            rules=self._rules,
            usable=self._rules.usable.get(rank),
            begin=self._begin,
            heads=pl.concat([_NO_HEAD, self._heads.get(rank, _NO_HEAD.clear())]),
            pool=self._pools.of(rank),
            adapters=self._adapters.get(rank, _NO_ADAPTERS),
            admissions=self._admissions.get(rank, _NO_ADMISSIONS),
        )


def _result(parts: list[pl.DataFrame], engines: list[_Engine]) -> Waiting:
    columns = ("waited", "full", "seen")
    sums = (
        pl.concat([pl.DataFrame(schema=_PART), *parts])
        .group_by("reason")
        .agg(pl.col(columns).sum())
        .filter(pl.col("waited") > 0)
        .sort("waited", "reason", descending=[True, False])
    )
    total = float(sums["waited"].sum())
    return Waiting(
        request_sec=total / 1e6,
        waited_sec=sum(engine.waited_micros for engine in engines) / 1e6,
        most=max((engine.most for engine in engines), default=0),
        by_reason={
            reason: Reason(waited / 1e6, waited / total, full / seen if seen else None)
            for reason, waited, full, seen in sums.iter_rows()
        },
    )


_PART = {"reason": pl.String, "waited": pl.Float64, "full": pl.Float64, "seen": pl.Float64}
"""Request-microseconds by reason; the same times the usage; those with a known usage."""


@dataclass
class _Engine:
    """One engine's steps, batch by batch.

    A row of the lookups stands for several lookups and has the time of the first one only. Each
    step that has tokens and places left looks the head up once, so n lookups that began in such a
    step belong to it and to the next n - 1 steps of that kind. ``open_steps``: how many steps of
    that kind have gone by. ``covered``: the last of them that lookups belong to. ``read``: how many
    rows of lookups have been read.
    """

    rules: Rules
    usable: int | None
    begin: int
    heads: pl.DataFrame
    pool: pl.DataFrame
    adapters: pl.DataFrame
    admissions: pl.DataFrame
    waited_micros: int = 0
    most: int = 0
    open_steps: int = 0
    covered: int = 0
    read: int = 0
    last: pl.DataFrame | None = None

    def add(self, steps: pl.DataFrame) -> pl.DataFrame:
        """The waiting by reason up to the last of these steps, which waits for the next batch."""
        rows = steps if self.last is None else pl.concat([self.last, steps])
        # A step begins no earlier than the one before it, whatever schedule_us says.
        rows = rows.with_columns(pl.col("began").cum_max())
        self.last = rows.tail(1)
        rows = rows.with_columns(until=pl.col("micros").shift(-1)).head(-1)
        return self._reasons(rows, self.last["began"][0])

    def close(self, end: int) -> pl.DataFrame:
        """The waiting by reason from the last step to the end."""
        assert self.last is not None
        return self._reasons(self.last.with_columns(until=pl.lit(end)), _NEVER)

    def _reasons(self, rows: pl.DataFrame, next_began: int) -> pl.DataFrame:
        rows = self._classified(self._with_heads(rows, next_began))
        until, at = (pl.col(name).clip(self.begin) for name in ("until", "micros"))
        rows = rows.filter(pl.col("waiting_reqs") > 0).with_columns(span=(until - at).clip(0))
        rows = rows.filter(pl.col("span") > 0)
        self.waited_micros += int(rows["span"].sum())
        self.most = max(self.most, rows.select(pl.col("waiting_reqs").max()).item() or 0)
        known = self._with_state(rows)
        waited = pl.col("span") * pl.col("waiting_reqs") * pl.col("steps") / pl.col("repeats")
        return pl.concat(
            known.with_columns(steps=steps)
            .filter(pl.col("steps") > 0)
            .select("usage_pct", reason=reason, waited=waited)
            .group_by("reason")
            .agg(
                pl.col("waited").sum(),
                full=(pl.col("waited") * pl.col("usage_pct")).sum(),
                seen=pl.col("waited").filter(pl.col("usage_pct").is_not_null()).sum(),
            )
            .cast(_PART)  # type: ignore[arg-type]
            for reason, steps in self._shares()
        )

    def _shares(self) -> Iterator[tuple[pl.Expr, pl.Expr]]:
        """Each kind of reason, and for how many of a row's steps it holds."""
        preempting = pl.col("preempting").cast(pl.Int64)
        yield pl.lit("preempting"), preempting
        first = (
            pl.when("token_budget").then(pl.lit("token_budget")).otherwise(pl.lit("max_num_seqs"))
        )
        yield first, pl.when(pl.col("open") == 0).then(pl.col("repeats") - preempting).otherwise(0)
        yield self.rules.of_looked_up(self.usable), pl.col("looked_up")
        yield self.rules.of_not_looked_up(self.usable), pl.col("open") - pl.col("looked_up")

    def _with_heads(self, rows: pl.DataFrame, next_began: int) -> pl.DataFrame:
        """The rows with ``lookups`` of their heads, and the heads' ``query_tokens`` and
        ``hit_tokens``."""
        begins = rows["began"].extend_constant(next_began, 1).slice(1)
        first, after = self.read, self.heads["micros"].search_sorted(begins)
        self.read = int(after[-1]) if rows.height else first
        rows = rows.with_row_index("row")
        lookups = (
            self.heads.slice(first, self.read - first)
            .select("micros", "lookups")
            .join_asof(rows.select("row", "began"), left_on="micros", right_on="began")
            .group_by("row")
            .agg(pl.col("lookups").sum())
        )
        heads = self.heads.select("query_tokens", "hit_tokens")[self._still_waiting(rows, after)]
        return rows.join(lookups, on="row", how="left", maintain_order="left").with_columns(
            pl.col("lookups").fill_null(0), *heads
        )

    def _still_waiting(self, rows: pl.DataFrame, after: pl.Series) -> pl.Series:
        """For each row the position of its head in ``heads``.

        It is the last one of the first ``after`` heads that had not been admitted by then.
        """
        at: pl.Series = after.cast(pl.Int64) - 1
        for _ in range(_BACK):
            admitted = self.heads["admitted_at"].gather(at) <= rows["micros"]
            gone = (admitted & (at > 0)).fill_null(False)
            if not gone.any():
                break
            at -= gone.cast(pl.Int64)
        return at

    def _classified(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows with ``preempting``, ``token_budget``, ``open`` (how many of their steps had
        tokens and places left) and ``looked_up`` (how many of these looked the head up)."""
        rules, lookups = self.rules, pl.col("lookups").cum_sum()
        stopped = rules.token_budget() | rules.max_num_seqs() | (pl.col("waiting_reqs") == 0)
        others = pl.col("repeats") - rules.preempting().cast(pl.Int64)
        rows = rows.with_columns(
            preempting=rules.preempting(),
            token_budget=rules.token_budget(),
            open=pl.when(stopped).then(0).otherwise(others),
        ).with_columns(before=self.open_steps + pl.col("open").cum_sum() - pl.col("open"))
        # Without a loop: covered = max(covered in the row before, before) + lookups.
        begun = (pl.col("before") - lookups + pl.col("lookups")).cum_max().clip(self.covered)
        rows = rows.with_columns(covered=begun + lookups).with_columns(
            looked_up=pl.min_horizontal((pl.col("covered") - pl.col("before")).clip(0), "open")
        )
        if rows.height:
            self.open_steps += int(rows["open"].sum())
            self.covered = rows["covered"][-1]
        return rows

    def _with_state(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows with the pool's state, the adapters that ran, and who was admitted next."""
        admitted = rows.join_asof(
            self.admissions, on="micros", strategy="forward", allow_exact_matches=False
        )
        arrived = pl.col("arrived") <= pl.col("micros")
        waiting = admitted.with_columns(next_tokens=pl.when(arrived).then("next_tokens"))
        return with_states(waiting, self.pool).join_asof(self.adapters, on="micros")


_BACK = 16
"""How many heads that have been admitted meanwhile are skipped."""
_NEVER = 1 << 62
_NO_HEAD = pl.DataFrame(
    {"micros": -1, "lookups": 0, "query_tokens": None, "hit_tokens": None, "admitted_at": None},
    schema_overrides=dict.fromkeys(("query_tokens", "hit_tokens", "admitted_at"), pl.Int64),
)
"""The head before the first lookup."""
_NO_ADAPTERS = pl.DataFrame(schema={"micros": pl.Int64, "adapters": pl.Int64})
_NO_ADMISSIONS = pl.DataFrame(schema=dict.fromkeys(("micros", "arrived", "next_tokens"), pl.Int64))


def _timed(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps with ``began`` and ``micros``: when ``schedule()`` began and ended.

    Both are rounded, so ``began`` is a microsecond early: never too late.
    """
    took = pl.col("schedule_us").fill_null(0).cast(pl.Int64)
    return (
        steps.with_columns(micros("timestamp_sec"))
        .with_columns(
            began=pl.col("micros") - took - 1,
            repeats=pl.col("repeats").fill_null(1).clip(1),
            waiting_reqs=pl.col("waiting_reqs").fill_null(0),
        )
        .drop("timestamp_sec", "schedule_us")
    )


def _refused_heads(session: Session) -> pl.DataFrame:
    """The lookups that did not lead to an admission, in the order of time.

    ``admitted_at``: when a later lookup of the request did, in microseconds.
    """
    admitted = pl.col("admitted") == 1
    lookups = session.collect(
        "prefix_cache_lookups",
        lambda table: table.select(
            "engine",
            micros("timestamp_sec"),
            "lookups",
            "query_tokens",
            "hit_tokens",
            "admitted",
            request=pl.col("request_id").hash(),
        ),
        history=True,
    ).sort("micros", maintain_order=True)
    admitted_at = pl.when(admitted).then("micros").backward_fill().over("engine", "request")
    return (
        lookups.with_columns(admitted_at=admitted_at).filter(~admitted).drop("request", "admitted")
    )


def _admissions(session: Session) -> pl.DataFrame:
    """When each request arrived and was admitted (``micros``), and the tokens of its prompt."""
    return session.collect(
        "requests",
        lambda table: table.filter(pl.col("queue_sec").is_not_null()).select(
            "engine",
            (pl.col("timestamp") * 1e3 + pl.col("queue_sec") * 1e6)
            .round()
            .cast(pl.Int64)
            .alias("micros"),
            arrived=micros("timestamp", 1e-3),
            next_tokens=pl.col("input_length"),
        ),
        history=True,
    ).sort("micros", maintain_order=True)


def _adapters(session: Session) -> pl.DataFrame:
    """How many adapters ran, from each change on, as far as requests have ended."""
    requests = session.collect(
        "requests",
        lambda table: table.filter(
            pl.col("lora").is_not_null() & pl.col("queue_sec").is_not_null()
        ).select(
            "engine",
            "lora",
            begin=(pl.col("timestamp") * 1e3 + pl.col("queue_sec") * 1e6).round().cast(pl.Int64),
            end=(pl.col("finish_sec") * 1e6).round().cast(pl.Int64),
        ),
        history=True,
    )
    changes = pl.concat(
        [
            requests.select("engine", "lora", micros=pl.col(at), change=pl.lit(change, pl.Int64))
            for at, change in (("begin", 1), ("end", -1))
        ]
    ).sort("micros", "change", descending=[False, True])
    running = pl.col("change").cum_sum().over("engine", "lora")
    before = running - pl.col("change")
    started = (before == 0) & (running > 0)
    stopped = (before > 0) & (running == 0)
    return changes.with_columns(
        adapters=(started.cast(pl.Int64) - stopped.cast(pl.Int64)).cum_sum().over("engine")
    ).select("engine", "micros", "adapters")
