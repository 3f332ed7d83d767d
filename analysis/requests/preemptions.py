# SPDX-License-Identifier: Apache-2.0
"""How often was a running request thrown out to make room, and what did that cost?

A request that is preempted gives its blocks up and, when it is admitted again, computes what it
no longer finds in the prefix cache. What it had computed is inferred: a request that was giving
its answer had computed all its tokens but the newest; one that was still computing its prompt had
computed its full blocks, and less than one block more, which is not counted. With asynchronous
scheduling the tokens in flight may be counted, too. Exact are the times of the preemption and of
the next admission, what was found then, and whose allocation took which of its blocks.

For whom room was made is told by the order of a step's allocations: the next one after the
victim's blocks were freed. Where none follows, the request that needed room was the victim itself:
it was the last one to preempt, and its own blocks did not make room enough either. A prompt that
is admitted by its first chunk and does not fit with its second is preempted like this again and
again.

With a KV connector, blocks that a step in flight may still write to are parked until it has ended
(``Scheduler._free_request_blocks`` in vllm/v1/core/sched/scheduler.py): preempting frees nothing at
once. vLLM 0.32 then puts the preemption off, and what needs a block gets no tokens meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import polars as pl

from analysis.prefix.prompts import Prompts
from analysis.requests.preemption_steps import TABLE, StepTally
from analysis.tables.facts import Facts
from analysis.tables.schema import TABLES
from analysis.tables.session import Session

ALLOCATIONS = "kv_cache_allocations"
EVICTION_COLUMNS = ("timestamp_sec", "owner_request", "evicting_request", "engine")

SHOWN = 10
"""How many preemptions are told one by one."""

_NAME = ["engine", "request_id"]


@dataclass(frozen=True)
class Preemption:
    """A request was preempted at ``preempted_sec`` and admitted again at ``resumed_sec``.

    ``computed_tokens``: what it had computed; ``found_tokens``: what it found of that when it was
    back; ``recomputed_tokens``: the rest. ``lost_sec``: from the preemption until the step in which
    it had its full blocks again, or until it was preempted once more.

    ``made_room_for``: the request that got blocks next, the victim itself if ``by_itself``; None
    where the cache was reset, or where the session does not tell. ``takers``: for whom its cached
    contents were evicted while it waited, and how many blocks of them, the most first.
    """

    request_id: str
    engine: int
    preempted_sec: float
    resumed_sec: float
    computed_tokens: int
    found_tokens: int
    recomputed_tokens: int
    lost_sec: float
    made_room_for: str | None
    by_itself: bool
    takers: Mapping[str, int]


@dataclass(frozen=True)
class ByItself:
    """A request that was preempted ``times`` for room that it needed itself."""

    request_id: str
    engine: int
    times: int


@dataclass(frozen=True)
class Parked:
    """What preempting did not free at once.

    ``preemptions``: those, of the resumed ones, whose ``blocks`` came free only after the step that
    preempted them; ``most_steps`` later and ``longest_sec`` later at most. ``put_off_steps``: steps
    before a preemption that left running requests out while no block was free, since the blocks
    of the one to preempt were in flight; ``put_off_sec``: until the preemption, all added up.
    """

    preemptions: int
    blocks: int
    most_steps: int
    longest_sec: float
    put_off_steps: int
    put_off_sec: float


@dataclass(frozen=True)
class Preemptions:
    """``count``: preemptions in all ``steps`` of the scheduler, idle ones included.

    ``resumed``: those after which the request was admitted again and has ended since: for these
    the cost is told. ``recomputed_tokens``: computed again because of them; ``tax``: their share,
    from 0 to 1, of the ``scheduled_tokens`` that were computed in all. ``lost_sec``: the sum over
    the requests. ``costliest``: most recomputed tokens first. ``by_itself``: how many were for the
    victim's own needs; ``livelocks``: the requests that this happened to, most often first.
    ``parked``: what preempting did not free at once.
    """

    count: int
    steps: int
    resumed: int
    recomputed_tokens: int
    scheduled_tokens: int
    tax: float | None
    lost_sec: float
    costliest: tuple[Preemption, ...]
    by_itself: int
    livelocks: tuple[ByItself, ...]
    parked: Parked


def victims(runs: pl.DataFrame, prompts: Prompts, begin_sec: float) -> pl.DataFrame:
    """One row for each preemption from ``begin_sec`` on after which the request was admitted again.

    Columns: ``engine``, ``request_id``, ``begin_sec`` (of its run), ``preempted_sec``,
    ``resumed_sec``, ``until_sec`` (the end of the run that began then), ``run`` and ``next_run``
    (their orders), ``had`` and ``found`` (tokens found at the beginning of both), ``asked`` (at the
    second), ``block_size``.

    Args:
        runs: what ``analysis.requests.stints.named`` found.
        prompts: of the same session.
        begin_sec: earlier ones are left out.

    """
    after = {
        "next_run": "order",
        "resumed_sec": "begin_sec",
        "until_sec": "end_sec",
        "next_kind": "kind",
        "next_found": "found",
        "next_asked": "asked",
    }
    # Most requests have one run, and are soon out of it.
    several = runs.filter(pl.col("request").is_duplicated())
    following = several.sort("order").with_columns(
        block_size=pl.lit(prompts.asked["block_size"].max(), pl.Int64),
        **{name: pl.col(column).shift(-1).over("request") for name, column in after.items()},
    )
    return (
        # A request whose blocks were never filled is admitted again, too, and then not resumed.
        following.filter(
            pl.col("next_kind").is_in(["resumed", "skipped"]) & (pl.col("end_sec") >= begin_sec)
        )
        .drop_nulls("block_size")
        .select(
            "engine",
            "request_id",
            "begin_sec",
            "resumed_sec",
            "until_sec",
            "next_run",
            "block_size",
            preempted_sec="end_sec",
            run="order",
            had="found",
            found="next_found",
            asked="next_asked",
        )
        .sort("preempted_sec", "run")
    )


@dataclass
class TakerTally:
    """Of the evictions seen so far: for whom the contents of preempted requests were evicted
    while these waited."""

    victims: pl.DataFrame
    parts: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        if self.victims.is_empty():
            return
        waiting = self.victims.select(
            "run", "resumed_sec", "preempted_sec", "engine", owner_request="request_id"
        )
        by = ["engine", "owner_request"]
        self.parts.append(
            batch.join(waiting.select(by).unique(), on=by, how="semi")
            .sort("timestamp_sec")
            .join_asof(
                waiting.sort("preempted_sec"),
                left_on="timestamp_sec",
                right_on="preempted_sec",
                by=by,
                check_sortedness=False,
            )
            .filter(pl.col("timestamp_sec") <= pl.col("resumed_sec"))
            .drop_nulls("evicting_request")
            .group_by("run", "evicting_request")
            .agg(pl.len().alias("blocks"))
        )

    def by_run(self, run: int) -> dict[str, int]:
        """Blocks by the request that they were evicted for, the most first."""
        if not self.parts:
            return {}
        rows = (
            pl.concat(self.parts)
            .filter(pl.col("run") == run)
            .group_by("evicting_request")
            .agg(pl.col("blocks").sum())
            .sort("blocks", "evicting_request", descending=[True, False])
        )
        return dict(rows.iter_rows())


def measure(
    session: Session, facts: Facts, preempted: pl.DataFrame, taken: TakerTally, steps: StepTally
) -> Preemptions:
    """The bill over all engines of the session.

    Args:
        session: the session.
        facts: of the session.
        preempted: what ``victims`` found.
        taken: that has seen all evictions.
        steps: that have seen all steps.

    Raises:
        SessionError: a table cannot be read.

    """
    scheduled = steps.scheduled_tokens
    priced = bill(session, facts, preempted, steps)
    recomputed = int(priced["recomputed"].sum())
    own = priced.filter("by_itself")
    return Preemptions(
        count=steps.preempted,
        steps=steps.steps,
        resumed=priced.height,
        recomputed_tokens=recomputed,
        scheduled_tokens=scheduled,
        tax=recomputed / scheduled if scheduled else None,
        lost_sec=float(priced["lost_sec"].sum()),
        costliest=tuple(
            Preemption(
                request_id=row["request_id"],
                engine=row["engine"],
                preempted_sec=row["preempted_sec"],
                resumed_sec=row["resumed_sec"],
                computed_tokens=row["computed"],
                found_tokens=row["found"],
                recomputed_tokens=row["recomputed"],
                lost_sec=row["lost_sec"],
                made_room_for=row["made_room_for"],
                by_itself=row["by_itself"],
                takers=taken.by_run(row["run"]),
            )
            for row in priced.sort("recomputed", "run", descending=[True, False])
            .head(SHOWN)
            .iter_rows(named=True)
        ),
        by_itself=own.height,
        livelocks=tuple(
            ByItself(**row)
            for row in own.group_by(_NAME)
            .agg(times=pl.len())
            .sort("times", *_NAME, descending=[True, False, False])
            .head(SHOWN)
            .iter_rows(named=True)
        ),
        parked=_parked(session, facts, priced),
    )


def _parked(session: Session, facts: Facts, priced: pl.DataFrame) -> Parked:
    later = priced.drop_nulls("parked_steps")
    steps, seconds = _put_off(session, facts)
    return Parked(
        preemptions=later.height,
        blocks=int(later["freed_blocks"].sum()),
        most_steps=max(later["parked_steps"], default=0),
        longest_sec=max(later["parked_sec"], default=0.0),
        put_off_steps=steps,
        put_off_sec=seconds,
    )


def _put_off(session: Session, facts: Facts) -> tuple[int, float]:
    """Steps that could not preempt, and the time until they could.

    Right before a step that preempts they leave requests out that run, and no block is free. There
    are such steps with a KV connector alone.
    """
    if facts.scheduler.connector is None:
        return 0, 0.0
    preempting = pl.col("preempted_reqs") > 0
    short = (pl.col("running_reqs") > pl.col("scheduled_reqs")) & ~preempting
    steps = session.collect(
        TABLE,
        lambda table: (
            table.select(
                "engine",
                "timestamp_sec",
                "repeats",
                until="timestamp_sec",
                put_off=short & pl.when(~short).then(preempting).backward_fill().over("engine"),
            )
            .with_columns(pl.col("until").shift(-1).over("engine"))
            .filter("put_off")
        ),
    )
    if steps.is_empty():
        return 0, 0.0
    pools = session.collect(
        "kv_cache_usage",
        lambda table: table.filter(pl.col("pool") == 0).select(
            "engine", "timestamp_sec", full=pl.col("cached_blocks") + pl.col("free_blocks") == 0
        ),
        history=True,
    )
    full = steps.sort("timestamp_sec").join_asof(
        pools.sort("timestamp_sec"), on="timestamp_sec", by="engine", check_sortedness=False
    )
    lasted = pl.col("until") - pl.col("timestamp_sec")
    count, seconds = full.filter("full").select(pl.col("repeats").sum(), lasted.sum()).row(0)
    return int(count), float(seconds)


def bill(
    session: Session, facts: Facts, preempted: pl.DataFrame, stepped: StepTally
) -> pl.DataFrame:
    """The victims with ``computed``, ``recomputed``, ``lost_sec``, ``made_room_for`` and
    ``by_itself``; ``freed_blocks``, and if these were parked, for how many steps and how long
    (``parked_steps``, ``parked_sec``): then ``preempted_sec`` is when that began."""
    moves = _moves(session, facts, preempted)
    steps = stepped.preempting().select("engine", "step", "preempted_reqs", at="timestamp_sec")
    freed = _with_parking(
        session,
        moves.filter(pl.col("event") == "free")
        .join(preempted, on="run")
        .filter(pl.col("timestamp_sec") == pl.col("preempted_sec"))
        .group_by("run")
        .agg(
            pl.col("row", "step", "engine", "preempted_sec").last(),
            freed_blocks=pl.col("num_blocks").sum(),
        ),
        steps,
    )
    cached = moves.filter(pl.col("event") == "cache")
    # What was scheduled in the step that preempted it was not computed any more.
    kept = (
        cached.join(freed.select("run", last="step"), on="run")
        .filter(pl.col("step") < pl.col("last"))
        .group_by("run")
        .agg(cached=pl.col("num_blocks").sum())
    )
    size, every = pl.col("block_size"), pl.col("asked") - 1
    full = pl.col("had") // size + pl.col("cached").fill_null(0)
    priced = (
        preempted.join(freed, on="run", how="left")
        .join(kept, on="run", how="left")
        .with_columns(pl.col("preempted_sec") - pl.col("parked_sec").fill_null(0))
        .with_columns(computed=pl.when(full >= every // size).then(every).otherwise(full * size))
        .with_columns(recomputed=(pl.col("computed") - pl.col("found")).clip(0))
    )
    wanted = (pl.col("computed") // size - pl.col("found") // size).alias("wanted")
    back = (
        cached.with_columns(so_far=pl.col("num_blocks").cum_sum().over("run"))
        .join(priced.select(wanted, run="next_run"), on="run")
        .filter(pl.col("so_far") >= pl.col("wanted"))
        .group_by(next_run="run")
        .agg(back_sec=pl.col("timestamp_sec").min())
    )
    end = pl.when(wanted <= 0).then("resumed_sec").otherwise(pl.coalesce("back_sec", "until_sec"))
    return (
        _with_cause(session, priced, steps)
        .join(back, on="next_run", how="left")
        .with_columns(lost_sec=end - pl.col("preempted_sec"))
        .sort("run")
    )


def _moves(session: Session, facts: Facts, preempted: pl.DataFrame) -> pl.DataFrame:
    """The ``free`` and ``cache`` rows of the victims in the full-attention group, by row, each
    with the ``run`` that it belongs to."""
    names = preempted.select(_NAME).unique()
    group = pl.col("group").fill_null(0) == facts.full_attention_group
    rows = _rows(
        session,
        lambda table: table.filter(pl.col("event").is_in(["free", "cache"]) & group).join(
            names.lazy(), on=_NAME, how="semi"
        ),
        preempted,
    )
    starts = pl.concat(
        [
            preempted.select(*_NAME, "run", "begin_sec"),
            preempted.select(*_NAME, run="next_run", begin_sec="resumed_sec"),
        ]
    )
    return (
        rows.sort("timestamp_sec", "row")
        .join_asof(
            starts.unique("run").sort("begin_sec"),
            left_on="timestamp_sec",
            right_on="begin_sec",
            by=_NAME,
            check_sortedness=False,
        )
        .select("row", "timestamp_sec", "event", "num_blocks", "step", "run")
        .drop_nulls("run")
        .sort("row")
    )


_IN_FLIGHT = 16
"""No more steps are in flight at once."""


def _with_parking(session: Session, freed: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """What was freed, each with the ``parked_steps`` and ``parked_sec`` since the step that
    preempted its request, if that had been scheduled before; ``step``: of the preemption.

    A step frees what it preempts before ``schedule()`` returns. What comes free later is laid to
    the last step that preempted more than was freed in it; with several in flight it may have been
    an earlier one, so the wait is told too short rather than too long.
    """
    place = ["engine", "step"]
    dropped = _rows(session, lambda table: table.filter(pl.col("event") == "reset"), freed)
    after_drop = freed.join(dropped.select(*place, drop="row"), on=place).filter(
        pl.col("drop") > pl.col("row")
    )
    at_once = freed.join(steps, on=place).filter(pl.col("preempted_sec") <= pl.col("at"))
    counts = at_once.group_by(place).agg(freed=pl.len())
    waiting = (
        steps.join(counts, on=place, how="left")
        .filter(pl.col("preempted_reqs") > pl.col("freed").fill_null(0))
        .select("engine", "at", preempting="step")
        .sort("at")
    )
    parked = (
        freed.join(
            pl.concat([at_once.select("run"), after_drop.select("run")]), on="run", how="anti"
        )
        .sort("preempted_sec")
        .join_asof(
            waiting, left_on="preempted_sec", right_on="at", by="engine", check_sortedness=False
        )
        .filter(pl.col("step") - pl.col("preempting") <= _IN_FLIGHT)
        .select(
            "run",
            "preempting",
            parked_steps=pl.col("step") - pl.col("preempting"),
            parked_sec=pl.col("preempted_sec") - pl.col("at"),
        )
    )
    return (
        freed.join(parked, on="run", how="left")
        .with_columns(step=pl.coalesce("preempting", "step"))
        .drop("preempting", "engine", "preempted_sec")
    )


def _with_cause(session: Session, priced: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """What came next in the step of each preemption, after its blocks were freed; of those that
    were parked the tables do not tell."""
    told = (
        priced.drop_nulls("row")
        .filter(pl.col("parked_steps").is_null())
        .join(steps, on=["engine", "step"], how="semi")
        .sort("row")
    )
    after = _rows(
        session,
        lambda table: table.filter(
            pl.col("event").is_in(["allocate", "reset", "reset_refused"])
        ).join(told.lazy().select("engine", "step").unique(), on=["engine", "step"], how="semi"),
        told,
    )
    causes = told.select("run", "row", "request_id", "engine", "step").join_asof(
        after.select("row", "engine", "step", "event", next_id="request_id").sort("row"),
        on="row",
        by=["engine", "step"],
        strategy="forward",
        check_sortedness=False,
    )
    by_itself = pl.col("event").is_null()
    return priced.join(
        causes.select(
            "run",
            by_itself=by_itself,
            made_room_for=pl.when(by_itself).then("request_id").otherwise("next_id"),
        ),
        on="run",
        how="left",
    ).with_columns(pl.col("by_itself").fill_null(value=False))


def _rows(
    session: Session, query: Callable[[pl.LazyFrame], pl.LazyFrame], wanted: pl.DataFrame
) -> pl.DataFrame:
    """These rows of kv_cache_allocations.csv, with their number ``row``; the table is not read
    where nothing is wanted."""

    def numbered(table: pl.LazyFrame) -> pl.LazyFrame:
        return query(table.with_row_index("row")).select(
            "row", "timestamp_sec", "event", "num_blocks", "request_id", "engine", "step"
        )

    if wanted.is_empty():
        return numbered(pl.LazyFrame(schema=TABLES[ALLOCATIONS].columns)).collect()
    return session.collect(ALLOCATIONS, numbered, history=True)
