# SPDX-License-Identifier: Apache-2.0
"""Why did requests wait, and were blocks free meanwhile?

At the end of each ``schedule()`` the requests that still wait do so for one reason: that which
made the scheduler stop admitting. The rules are those of ``Scheduler.schedule`` in vLLM 0.32
(vllm/v1/core/sched/scheduler.py), in its order: a step that preempts admits nobody; then it
admits while tokens are left in the step, and places among the running; the head of the queue must
have its adapter, and then its blocks (``KVCacheManager.allocate_slots``). What a step's row, the
pool's state and the lookup of the head decide is exact; the rest is inferred, as
``docs/concepts.md`` says.

A step's reason holds for all that wait, until the next step of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from analysis.pool.capacity import block_size_of, usable_blocks
from analysis.pool.pressure import States, by_engine, micros, with_states
from analysis.pool.usage import Usage
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
    """``request_sec``: requests that waited for this reason, times seconds; ``share`` of all
    waiting. ``usage_pct``: how full the pool was meanwhile, as a mean over ``request_sec``; None
    where it is not known."""

    request_sec: float
    share: float
    usage_pct: float | None


@dataclass(frozen=True)
class Waiting:
    """``request_sec``: waiting in all, as requests times seconds; ``waited_sec``: the time in
    which any request waited, all engines added up; ``most``: requests that waited at once in an
    engine. ``by_reason``, the largest first:

    ``preempting``: the step preempted a request, and so admitted none.
    ``token_budget``: all tokens of the step were given out.
    ``max_num_seqs``: as many requests ran as may.
    ``never_fits``: the head of the queue needs more blocks than the pool has.
    ``no_blocks``: not even the next chunk of the head had room.
    ``whole_prompt``: its next chunk had, its whole prompt had not.
    ``watermark``: its prompt had, but for the blocks that stay free for those that run.
    ``blocks``: one of these three; the session does not tell which (several KV cache groups).
    ``no_chunking``: its prompt is longer than what was left of the step, and is not cut up.
    ``lora``: as many adapters ran as may.
    ``connector``: it waited for the KV connector.
    ``paused``: nothing ran and nobody was looked up: the engine was paused, or all that waited
    were not ready (a grammar, a client that streams its input, results still in flight).
    ``not_known``: none of these.
    """

    request_sec: float
    waited_sec: float
    most: int
    by_reason: Mapping[str, Reason]


def measure(session: Session, facts: Facts, usage: Usage, pools: States) -> Waiting:
    """The waiting of all engines of the session, in one pass over its steps.

    Raises:
        SessionError: a table cannot be read.

    """
    collected = WaitingTally(session, facts, usage, pools)
    for batch in session.batches(TABLE, COLUMNS, history=True):
        collected.add(batch)
    return collected.result()


class WaitingTally:
    """The waiting up to the steps seen so far, which are all of the session's, warm-up included."""

    def __init__(self, session: Session, facts: Facts, usage: Usage, pools: States) -> None:
        self._rules = _Rules.of(facts, usage)
        self._begin, self._end = round(session.begin_sec * 1e6), round(session.end_sec * 1e6)
        self._pools = pools
        self._heads = by_engine(_refused_heads(session))
        self._adapters = by_engine(_adapters(session)) if facts.scheduler.max_loras else {}
        told_by_admissions = facts.prefix_caching is False
        self._admissions = by_engine(_admissions(session)) if told_by_admissions else {}
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
"""Request-microseconds by reason; times the usage; those of which the usage is known."""


@dataclass(frozen=True)
class _Rules:
    """What the scheduler goes by. ``block_size`` and ``usable`` (blocks, by engine) are there
    only where a request's blocks can be told by its tokens."""

    facts: Facts
    block_size: int | None
    usable: Mapping[int, int]

    @classmethod
    def of(cls, facts: Facts, usage: Usage) -> _Rules:
        return cls(facts, block_size_of(facts, usage), usable_blocks(facts, usage))

    def preempting(self) -> pl.Expr:
        return pl.col("preempted_reqs").fill_null(0) > 0

    def token_budget(self) -> pl.Expr:
        limits = self.facts.scheduler
        slots = limits.draft_slots or 0
        tokens, requests = pl.col("scheduled_tokens"), pl.col("scheduled_reqs")
        spent = [
            tokens >= pl.lit(limits.max_num_scheduled_tokens, pl.Int64),
            tokens + slots * (requests + 1) >= pl.lit(limits.max_num_batched_tokens, pl.Int64),
        ]
        return pl.any_horizontal(*(rule.fill_null(False) for rule in spent))

    def max_num_seqs(self) -> pl.Expr:
        places = pl.lit(self.facts.scheduler.max_num_active_seqs, pl.Int64)
        return (pl.col("running_reqs") >= places).fill_null(False)

    def refusal(self, usable: int | None, tokens: pl.Expr, hit: pl.Expr) -> pl.Expr:
        """Why a head of so many tokens, of which so many were found, was not admitted; null where
        blocks do not explain it."""
        limits, size = self.facts.scheduler, self.block_size
        left = pl.lit(limits.max_num_scheduled_tokens, pl.Int64) - pl.col("scheduled_tokens")
        new = tokens - hit
        no_chunking = pl.lit(limits.chunked_prefill is False) & (new > left)
        if size is None or usable is None:
            return pl.when(no_chunking).then(pl.lit("no_chunking"))
        chunk = pl.min_horizontal(new, left)
        if limits.long_prefill_token_threshold:
            several = pl.col("running_reqs") + pl.col("waiting_reqs") > 1
            capped = pl.min_horizontal(chunk, limits.long_prefill_token_threshold)
            chunk = pl.when(several).then(capped).otherwise(chunk)
        next_chunk = _blocks(hit + chunk + (limits.lookahead_tokens or 0), size)
        whole = pl.max_horizontal(next_chunk, _blocks(tokens, size))
        needed = whole if limits.scheduler_reserve_full_isl else next_chunk
        # Blocks of the hit that others hold need no room; those that nobody holds do.
        shared, available = hit // size, pl.col("available")
        return (
            pl.when(no_chunking)
            .then(pl.lit("no_chunking"))
            .when(_blocks(tokens, size) > usable)
            .then(pl.lit("never_fits"))
            .when(next_chunk - shared > available)
            .then(pl.lit("no_blocks"))
            .when(needed - shared > available)
            .then(pl.lit("whole_prompt"))
            .when(needed - shared + self._watermark(usable) > available)
            .then(pl.lit("watermark"))
            .when(next_chunk > available)
            .then(pl.lit("no_blocks"))
            .when(needed > available)
            .then(pl.lit("whole_prompt"))
            .when(needed + self._watermark(usable) > available)
            .then(pl.lit("watermark"))
        )

    def _watermark(self, usable: int) -> pl.Expr:
        """Blocks that an admission must leave free, as KVCacheManager computes them: of all of the
        engine's, the null block included."""
        blocks = int((self.facts.scheduler.watermark or 0) * (usable + 1))
        return pl.when(pl.col("running_reqs") > 0).then(blocks).otherwise(0)

    def of_looked_up(self, usable: int | None) -> pl.Expr:
        """The reason of steps whose head was looked up and not admitted."""
        unexplained = "not_known"
        if self.facts.scheduler.connector:
            unexplained = "connector"
        elif self.block_size is None:
            unexplained = "blocks"
        reason = self.refusal(usable, pl.col("query_tokens"), pl.col("hit_tokens"))
        return reason.fill_null(pl.lit(unexplained))

    def of_not_looked_up(self, usable: int | None) -> pl.Expr:
        """The reason of steps that had tokens and places left, and looked nobody up."""
        limits = self.facts.scheduler
        if self.facts.prefix_caching is False:
            refusal = self.refusal(usable, pl.col("next_tokens"), pl.lit(0))
        else:
            refusal = pl.lit(None, pl.String)
        adapters = pl.col("adapters") >= pl.lit(limits.max_loras, pl.Int64)
        return (
            pl.when(adapters.fill_null(False))
            .then(pl.lit("lora"))
            .when(pl.lit(bool(limits.connector)))
            .then(pl.lit("connector"))
            .when(refusal.is_not_null())
            .then(refusal)
            .when(pl.col("scheduled_tokens") == 0)
            .then(pl.lit("paused"))
            .otherwise(pl.lit("not_known"))
        )


@dataclass
class _Engine:
    """One engine's steps, given piece by piece.

    A row of the lookups stands for several, of which only the first one's time is told. They are
    counted on: the head is looked up once in each step that has tokens and places left, so n
    lookups that began in a step cover it and the next n - 1 such steps. ``open_steps`` counts the
    steps of that kind so far, ``covered`` is the one up to which lookups reach, ``told`` counts
    the rows of lookups that have been read.
    """

    rules: _Rules
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
    told: int = 0
    last: pl.DataFrame | None = None

    def add(self, steps: pl.DataFrame) -> pl.DataFrame:
        """The waiting by reason between the steps up to the last of these, which is kept."""
        rows = steps if self.last is None else pl.concat([self.last, steps])
        # A step begins no earlier than the one before it, whatever schedule_us says.
        rows = rows.with_columns(pl.col("began").cum_max())
        self.last = rows.tail(1)
        rows = rows.with_columns(until=pl.col("micros").shift(-1)).head(-1)
        return self._reasons(rows, self.last["began"][0])

    def close(self, end: int) -> pl.DataFrame:
        """The waiting from the last step to the end."""
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
        """Each kind of reason, and how many of a row's steps it holds for."""
        preempting = pl.col("preempting").cast(pl.Int64)
        yield pl.lit("preempting"), preempting
        first = (
            pl.when("token_budget").then(pl.lit("token_budget")).otherwise(pl.lit("max_num_seqs"))
        )
        yield first, pl.when(pl.col("open") == 0).then(pl.col("repeats") - preempting).otherwise(0)
        yield self.rules.of_looked_up(self.usable), pl.col("looked_up")
        yield self.rules.of_not_looked_up(self.usable), pl.col("open") - pl.col("looked_up")

    def _with_heads(self, rows: pl.DataFrame, next_began: int) -> pl.DataFrame:
        """The rows with how often their heads were looked up, and with the heads' tokens."""
        begins = rows["began"].extend_constant(next_began, 1).slice(1)
        first, after = self.told, self.heads["micros"].search_sorted(begins)
        self.told = int(after[-1]) if rows.height else first
        rows = rows.with_row_index("row")
        lookups = (
            self.heads.slice(first, self.told - first)
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
        """For each row the position of its head: of those looked up so far, ``after`` in number,
        the last one that had not been admitted."""
        at: pl.Series = after.cast(pl.Int64) - 1
        for _ in range(_BACK):
            admitted = self.heads["admitted_at"].gather(at) <= rows["micros"]
            gone = (admitted & (at > 0)).fill_null(False)
            if not gone.any():
                break
            at -= gone.cast(pl.Int64)
        return at

    def _classified(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows with ``preempting``, ``token_budget``, and how many of their steps had tokens
        and places left (``open``), and of these looked the head up."""
        rules, lookups = self.rules, pl.col("lookups").cum_sum()
        stopped = rules.token_budget() | rules.max_num_seqs() | (pl.col("waiting_reqs") == 0)
        others = pl.col("repeats") - rules.preempting().cast(pl.Int64)
        rows = rows.with_columns(
            preempting=rules.preempting(),
            token_budget=rules.token_budget(),
            open=pl.when(stopped).then(0).otherwise(others),
        ).with_columns(before=self.open_steps + pl.col("open").cum_sum() - pl.col("open"))
        # covered = max(covered in the row before, before) + lookups, without a loop.
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
        told = admitted.with_columns(next_tokens=pl.when(arrived).then("next_tokens"))
        return with_states(told, self.pool).join_asof(self.adapters, on="micros")


_BACK = 16
"""How many heads that have been admitted are looked past."""
_NEVER = 1 << 62
_NO_HEAD = pl.DataFrame(
    {"micros": -1, "lookups": 0, "query_tokens": None, "hit_tokens": None, "admitted_at": None},
    schema_overrides=dict.fromkeys(("query_tokens", "hit_tokens", "admitted_at"), pl.Int64),
)
"""Before anybody was looked up."""
_NO_ADAPTERS = pl.DataFrame(schema={"micros": pl.Int64, "adapters": pl.Int64})
_NO_ADMISSIONS = pl.DataFrame(schema=dict.fromkeys(("micros", "arrived", "next_tokens"), pl.Int64))


def _blocks(tokens: pl.Expr, size: int) -> pl.Expr:
    return (tokens + size - 1) // size


def _timed(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps with the microseconds at which ``schedule()`` began (or just before: both ends
    are rounded) and ended."""
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
    """Lookups that did not lead to an admission, in the order of time; ``admitted_at``: when a
    later one did."""
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
    """When each request that has ended was admitted, and with how many tokens."""
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
    """How many adapters ran, from each change on, told by the requests that have ended."""
    runs = session.collect(
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
            runs.select("engine", "lora", micros=pl.col(at), change=pl.lit(change, pl.Int64))
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
