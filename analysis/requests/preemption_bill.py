# SPDX-License-Identifier: Apache-2.0
"""What did each preemption cost, and for which request was room made?

The order of a step's allocations shows for whom room was made: for the request of the next
allocation after the victim's blocks were freed. Where none follows, the victim itself needed the
room: it was the last request left to preempt, and its own blocks were not enough either. A prompt
whose first chunk fits and whose second does not is preempted like this again and again.

With a KV connector vLLM parks blocks that a step in flight may still write to
(``Scheduler._free_request_blocks`` in vllm/v1/core/sched/scheduler.py), so that they come free
after the step that preempted their request.
"""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from analysis.requests.preemption_steps import StepTally
from analysis.tables.facts import Facts
from analysis.tables.schema import TABLES
from analysis.tables.session import Session

ALLOCATIONS = "kv_cache_allocations"

_NAME = ["engine", "request_id"]


def measure(
    session: Session, facts: Facts, preempted: pl.DataFrame, tally: StepTally
) -> pl.DataFrame:
    """The bill of each preemption, in the order of the admissions.

    Columns: those of ``preempted``; ``computed`` and ``recomputed`` (tokens), ``lost_sec``,
    ``made_room_for`` and ``by_itself``, as in ``analysis.requests.preemptions.Preemption``; ``row``
    (of the last free in kv_cache_allocations.csv), ``step``, ``freed_blocks``; ``cached`` (blocks
    that the stint had filled); ``parked_steps`` and ``parked_sec``, null where the blocks were not
    parked. Where they were, ``preempted_sec`` is the time at which that began.

    Args:
        session: the session.
        facts: of the session.
        preempted: what ``analysis.requests.preemptions.victims`` returns.
        tally: that has seen all steps.

    Raises:
        SessionError: a table cannot be read.

    """
    moves = _moves(session, facts, preempted)
    steps = tally.preempting().select("engine", "step", "preempted_reqs", at="timestamp_sec")
    freed = _with_parking(
        session,
        moves.filter(pl.col("event") == "free")
        .join(preempted, on="stint")
        .filter(pl.col("timestamp_sec") == pl.col("preempted_sec"))
        .group_by("stint")
        .agg(
            pl.col("row", "step", "engine", "preempted_sec").last(),
            freed_blocks=pl.col("num_blocks").sum(),
        ),
        steps,
    )
    cached = moves.filter(pl.col("event") == "cache")
    # Tokens that the preempting step had scheduled for the victim were not computed any more.
    filled = (
        cached.join(freed.select("stint", last="step"), on="stint")
        .filter(pl.col("step") < pl.col("last"))
        .group_by("stint")
        .agg(cached=pl.col("num_blocks").sum())
    )
    size, every = pl.col("block_size"), pl.col("asked") - 1
    full = pl.col("had") // size + pl.col("cached").fill_null(0)
    priced = (
        preempted.join(freed, on="stint", how="left")
        .join(filled, on="stint", how="left")
        .with_columns(pl.col("preempted_sec") - pl.col("parked_sec").fill_null(0))
        .with_columns(computed=pl.when(full >= every // size).then(every).otherwise(full * size))
        .with_columns(recomputed=(pl.col("computed") - pl.col("found")).clip(0))
    )
    wanted = (pl.col("computed") // size - pl.col("found") // size).alias("wanted")
    back = (
        cached.with_columns(so_far=pl.col("num_blocks").cum_sum().over("stint"))
        .join(priced.select(wanted, stint="next_stint"), on="stint")
        .filter(pl.col("so_far") >= pl.col("wanted"))
        .group_by(next_stint="stint")
        .agg(back_sec=pl.col("timestamp_sec").min())
    )
    end = pl.when(wanted <= 0).then("resumed_sec").otherwise(pl.coalesce("back_sec", "until_sec"))
    return (
        _with_cause(session, priced, steps)
        .join(back, on="next_stint", how="left")
        .with_columns(lost_sec=end - pl.col("preempted_sec"))
        .sort("stint")
    )


def _moves(session: Session, facts: Facts, preempted: pl.DataFrame) -> pl.DataFrame:
    """The ``free`` and ``cache`` rows of the victims in the full-attention group, by row, each
    with the ``stint`` that it belongs to."""
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
            preempted.select(*_NAME, "stint", "begin_sec"),
            preempted.select(*_NAME, stint="next_stint", begin_sec="resumed_sec"),
        ]
    )
    return (
        rows.sort("timestamp_sec", "row")
        .join_asof(
            starts.unique("stint").sort("begin_sec"),
            left_on="timestamp_sec",
            right_on="begin_sec",
            by=_NAME,
            check_sortedness=False,
        )
        .select("row", "timestamp_sec", "event", "num_blocks", "step", "stint")
        .drop_nulls("stint")
        .sort("row")
    )


_IN_FLIGHT = 16
"""At most so many steps are in flight at once."""


def _with_parking(session: Session, freed: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The frees with ``parked_steps`` and ``parked_sec``, which passed between the preemption and
    the free, null where the blocks were not parked; ``step``: the one that preempted.

    A step frees the blocks of a victim before ``schedule()`` returns, unless they are parked. So
    blocks that come free later belong to the last step that preempted more requests than it freed.
    With several such steps in flight it may have been an earlier one: the wait may be longer than
    it seems, and never shorter.
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
            pl.concat([at_once.select("stint"), after_drop.select("stint")]), on="stint", how="anti"
        )
        .sort("preempted_sec")
        .join_asof(
            waiting, left_on="preempted_sec", right_on="at", by="engine", check_sortedness=False
        )
        .filter(pl.col("step") - pl.col("preempting") <= _IN_FLIGHT)
        .select(
            "stint",
            "preempting",
            parked_steps=pl.col("step") - pl.col("preempting"),
            parked_sec=pl.col("preempted_sec") - pl.col("at"),
        )
    )
    return (
        freed.join(parked, on="stint", how="left")
        .with_columns(step=pl.coalesce("preempting", "step"))
        .drop("preempting", "engine", "preempted_sec")
    )


def _with_cause(session: Session, priced: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The bill with ``made_room_for`` and ``by_itself``, from the allocation that follows the free
    in the preempting step. For parked blocks the tables do not show it."""
    known = (
        priced.drop_nulls("row")
        .filter(pl.col("parked_steps").is_null())
        .join(steps, on=["engine", "step"], how="semi")
        .sort("row")
    )
    after = _rows(
        session,
        lambda table: table.filter(
            pl.col("event").is_in(["allocate", "reset", "reset_refused"])
        ).join(known.lazy().select("engine", "step").unique(), on=["engine", "step"], how="semi"),
        known,
    )
    causes = known.select("stint", "row", "request_id", "engine", "step").join_asof(
        after.select("row", "engine", "step", "event", next_id="request_id").sort("row"),
        on="row",
        by=["engine", "step"],
        strategy="forward",
        check_sortedness=False,
    )
    by_itself = pl.col("event").is_null()
    return priced.join(
        causes.select(
            "stint",
            by_itself=by_itself,
            made_room_for=pl.when(by_itself).then("request_id").otherwise("next_id"),
        ),
        on="stint",
        how="left",
    ).with_columns(pl.col("by_itself").fill_null(value=False))


def _rows(
    session: Session, query: Callable[[pl.LazyFrame], pl.LazyFrame], wanted: pl.DataFrame
) -> pl.DataFrame:
    """These rows of kv_cache_allocations.csv with their numbers, ``row``.

    The table is not read where ``wanted`` is empty.
    """

    def numbered(table: pl.LazyFrame) -> pl.LazyFrame:
        return query(table.with_row_index("row")).select(
            "row", "timestamp_sec", "event", "num_blocks", "request_id", "engine", "step"
        )

    if wanted.is_empty():
        return numbered(pl.LazyFrame(schema=TABLES[ALLOCATIONS].columns)).collect()
    return session.collect(ALLOCATIONS, numbered, history=True)
