# SPDX-License-Identifier: Apache-2.0
"""Which requests were never admitted, and which of them never can be?

A request can never run to its end if its tokens need more blocks than the pool has. The session
shows that only for one KV cache group of full attention and one pool, where a request needs one
block for every ``block_size`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.pool.usable import block_size_of, usable_blocks
from analysis.pool.usage import Usage
from analysis.requests.preemption_steps import StepTally
from analysis.tables.facts import Facts
from analysis.tables.session import Session

TABLE = "prefix_cache_lookups"
SHOWN = 10
"""How many requests that can never run are named."""


@dataclass(frozen=True)
class TooLarge:
    """A request whose ``tokens`` need ``needed_blocks``, while the pool has ``usable_blocks``.

    ``lookups``: how often the scheduler looked it up.
    """

    request_id: str
    engine: int
    tokens: int
    needed_blocks: int
    usable_blocks: int
    lookups: int


@dataclass(frozen=True)
class PreemptsItself:
    """A request that ran alone and found no room for its next chunk, so many ``times``.

    Each time it gave up its blocks, was admitted again, and came no further.
    """

    request_id: str
    engine: int
    times: int


@dataclass(frozen=True)
class Admission:
    """``looked_up``: how many requests, by engine and id, were looked up.

    ``never_admitted``: those that no lookup led to an admission, neither in the warm-up.
    ``too_large``: how many can never run, None where the session does not show it; ``largest``:
    the largest of them. ``self_preempted``: how many preempted themselves more than once while
    they ran alone; ``circling``: those that did so most often.
    """

    looked_up: int
    never_admitted: int
    too_large: int | None
    largest: tuple[TooLarge, ...]
    self_preempted: int
    circling: tuple[PreemptsItself, ...]


def measure(session: Session, facts: Facts, usage: Usage, steps: StepTally) -> Admission:
    """Admission over all engines of the session.

    Args:
        session: the session.
        facts: of the session.
        usage: of its pools.
        steps: a tally that has seen all its steps.

    Raises:
        SessionError: the table cannot be read.

    """
    looked_up, never_admitted = session.collect(
        TABLE,
        lambda table: _by_request(table, session.begin_sec).select(
            pl.len(), never_admitted=(pl.col("admitted") == 0).sum()
        ),
        history=True,
    ).row(0)
    circling = _circling(session, steps)
    self_preempted = (
        circling.height,
        tuple(PreemptsItself(*row) for row in circling.head(SHOWN).iter_rows()),
    )
    block_size = block_size_of(facts, usage)
    usable = usable_blocks(facts, usage)
    if block_size is None or not usable:
        return Admission(looked_up, never_admitted, None, (), *self_preempted)
    limits = pl.LazyFrame(
        {"engine": list(usable), "usable_blocks": list(usable.values())},
        schema={"engine": pl.Int64, "usable_blocks": pl.Int64},
    )
    needed = (pl.col("tokens") + block_size - 1) // block_size
    too_large = session.collect(
        TABLE,
        lambda table: (
            _by_request(table, session.begin_sec)
            .join(limits, on="engine")
            .with_columns(needed_blocks=needed)
            .filter(pl.col("needed_blocks") > pl.col("usable_blocks"))
            .select("request_id", "engine", "tokens", "needed_blocks", "usable_blocks", "lookups")
        ),
        history=True,
    ).sort("tokens", "request_id", descending=[True, False])
    largest = tuple(TooLarge(*row) for row in too_large.head(SHOWN).iter_rows())
    return Admission(looked_up, never_admitted, too_large.height, largest, *self_preempted)


def _circling(session: Session, steps: StepTally) -> pl.DataFrame:
    """Requests that preempted themselves while they ran alone, and how often.

    A step in which that happens preempts one request, leaves none running and schedules nothing.
    """
    alone = (
        (pl.col("preempted_reqs") == 1)
        & (pl.col("running_reqs") == 0)
        & (pl.col("scheduled_tokens") == 0)
    )
    counts = pl.col("timestamp_sec") >= session.begin_sec
    alone_steps = steps.preempting().filter(counts & alone).select("engine", "step")
    if alone_steps.is_empty():
        return pl.DataFrame(schema={"request_id": pl.String, "engine": pl.Int64, "times": pl.Int64})
    return session.collect(
        "kv_cache_allocations",
        lambda table: (
            table.filter(pl.col("event") == "free")
            .join(alone_steps.lazy(), on=["engine", "step"], how="semi")
            .group_by("request_id", "engine")
            .agg(times=pl.col("step").n_unique().cast(pl.Int64))
            .filter(pl.col("times") > 1)
        ),
    ).sort("times", "request_id", descending=[True, False])


def _by_request(table: pl.LazyFrame, begin_sec: float) -> pl.LazyFrame:
    """The requests that were looked up from ``begin_sec`` on.

    They may have been admitted before: a preempted request is looked up again.
    """
    in_window = pl.col("timestamp_sec") >= begin_sec
    return (
        table.group_by("engine", "request_id")
        .agg(
            pl.col("admitted").max().fill_null(0),
            pl.col("lookups").filter(in_window).sum(),
            tokens=pl.col("query_tokens").max(),
        )
        .filter(pl.col("lookups") > 0)
    )
