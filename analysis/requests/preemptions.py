# SPDX-License-Identifier: Apache-2.0
"""How often was a running request preempted to make room, and what did that cost?

A preempted request gives its blocks up. When it is admitted again, it computes what it no longer
finds in the prefix cache. Exact are the times of the preemption and of the next admission, the
tokens found then, and which requests' allocations evicted its contents.

The tokens that it had computed before are inferred. A request that was giving its answer had
computed all its tokens but the newest. One that was still computing its prompt had computed its
full blocks, and less than one block more, which is not counted. With asynchronous scheduling the
tokens in flight may be counted, too.

With a KV connector, vLLM 0.32 may put a preemption off: blocks that a step in flight writes to
would only be parked, and preempting would free nothing at once. Requests that need a block get no
tokens meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from analysis.prefix.prompts import Prompts
from analysis.requests.preemption_steps import TABLE, StepTally
from analysis.tables.facts import Facts
from analysis.tables.session import Session

EVICTION_COLUMNS = ("timestamp_sec", "owner_request", "evicting_request", "engine")

SHOWN = 10
"""How many preemptions are named one by one, the costliest ones."""

_NAME = ["engine", "request_id"]


@dataclass(frozen=True)
class Preemption:
    """A request was preempted at ``preempted_sec`` and admitted again at ``resumed_sec``.

    ``computed_tokens``: those that it had computed. ``found_tokens``: those of them that it found
    at its next admission; ``recomputed_tokens``: the others. ``lost_sec``: from the preemption
    until the step in which it had its full blocks again, or until its next preemption.

    ``made_room_for``: the request that got blocks next, the victim itself if ``by_itself``; None
    where the cache was reset, or where the session does not show it. ``takers``: requests that
    evicted its contents while it waited, and how many blocks of them, the most first.
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
    """A request that was preempted ``times`` times for room that it needed itself."""

    request_id: str
    engine: int
    times: int


@dataclass(frozen=True)
class Parked:
    """Blocks that preemptions did not free at once, and preemptions that were put off.

    ``preemptions``: resumed ones whose ``blocks`` came free after the step that preempted, at most
    ``most_steps`` and ``longest_sec`` later. ``put_off_steps``: steps before a preemption that
    left running requests out while no block was free, since the blocks of the victim were in
    flight. ``put_off_sec``: the time of these steps until the preemption.
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

    ``resumed``: preemptions after which the request was admitted again and has ended since. All
    that follows is about these. ``recomputed_tokens``: tokens computed again because of them;
    ``tax``: the share of these in the ``scheduled_tokens`` of all steps, from 0 to 1.
    ``lost_sec``: the sum over the requests. These three are None where requests were preempted and
    none of them is known to have come back. ``costliest``: those with most recomputed tokens.
    ``by_itself``: how many made room for the victim itself; ``livelocks``: the requests that this
    happened to most often. ``parked``: blocks that did not come free at once.
    """

    count: int
    steps: int
    resumed: int
    recomputed_tokens: int | None
    scheduled_tokens: int
    tax: float | None
    lost_sec: float | None
    costliest: tuple[Preemption, ...]
    by_itself: int
    livelocks: tuple[ByItself, ...]
    parked: Parked


def victims(stints: pl.DataFrame, prompts: Prompts, begin_sec: float) -> pl.DataFrame:
    """A row for each preemption from ``begin_sec`` on after which the request was admitted again.

    Columns: ``engine``, ``request_id``; ``begin_sec`` and ``preempted_sec`` (when the stint before
    the preemption began and ended), ``resumed_sec`` and ``until_sec`` (the same of the stint after
    it), ``stint`` and ``next_stint`` (their numbers, as ``order`` in ``stints``), ``had`` and
    ``found`` (tokens that the lookups of both found), ``asked`` (tokens that the second asked
    for), ``block_size`` (tokens).

    Args:
        stints: what ``analysis.requests.stints.with_lookups`` returns.
        prompts: of the same session.
        begin_sec: preemptions before it are left out.

    """
    after = {
        "next_stint": "order",
        "resumed_sec": "begin_sec",
        "until_sec": "end_sec",
        "next_kind": "kind",
        "next_found": "found",
        "next_asked": "asked",
    }
    # Most requests have one stint, and need no sorting.
    several = stints.filter(pl.col("request").is_duplicated())
    following = several.sort("order").with_columns(
        block_size=pl.lit(prompts.asked["block_size"].max(), pl.Int64),
        **{name: pl.col(column).shift(-1).over("request") for name, column in after.items()},
    )
    return (
        # A request whose blocks were never filled is admitted again, too, and not as a resumed one.
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
            "next_stint",
            "block_size",
            preempted_sec="end_sec",
            stint="order",
            had="found",
            found="next_found",
            asked="next_asked",
        )
        .sort("preempted_sec", "stint")
    )


@dataclass
class TakerTally:
    """Counts the evictions of preempted requests' contents while these waited, by evictor.

    ``victims``: what the function of this name returns.
    """

    victims: pl.DataFrame
    parts: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        if self.victims.is_empty():
            return
        waiting = self.victims.select(
            "stint", "resumed_sec", "preempted_sec", "engine", owner_request="request_id"
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
            .group_by("stint", "evicting_request")
            .agg(pl.len().alias("blocks"))
        )

    def of_stint(self, stint: int) -> dict[str, int]:
        """Blocks by the request that evicted them after this stint, the most first."""
        if not self.parts:
            return {}
        rows = (
            pl.concat(self.parts)
            .filter(pl.col("stint") == stint)
            .group_by("evicting_request")
            .agg(pl.col("blocks").sum())
            .sort("blocks", "evicting_request", descending=[True, False])
        )
        return dict(rows.iter_rows())


def measure(
    session: Session, facts: Facts, priced: pl.DataFrame, taken: TakerTally, steps: StepTally
) -> Preemptions:
    """The preemptions over all engines of the session, and what they cost.

    Args:
        session: the session.
        facts: of the session.
        priced: what ``analysis.requests.preemption_bill.measure`` returns.
        taken: a tally that has seen all evictions.
        steps: a tally that has seen all steps.

    Raises:
        SessionError: a table cannot be read.

    """
    scheduled = steps.scheduled_tokens
    is_known = bool(priced.height) or not steps.preempted
    recomputed = int(priced["recomputed"].sum()) if is_known else None
    own = priced.filter("by_itself")
    return Preemptions(
        count=steps.preempted,
        steps=steps.steps,
        resumed=priced.height,
        recomputed_tokens=recomputed,
        scheduled_tokens=scheduled,
        tax=recomputed / scheduled if scheduled and recomputed is not None else None,
        lost_sec=float(priced["lost_sec"].sum()) if is_known else None,
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
                takers=taken.of_stint(row["stint"]),
            )
            for row in priced.sort("recomputed", "stint", descending=[True, False])
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
    """Steps that put a preemption off, and the time until it came.

    They come right before a step that preempts, leave running requests out, and see no block free.
    There are such steps only with a KV connector.
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
