# SPDX-License-Identifier: Apache-2.0
"""What are a request's phases?

A request is ``queued`` from its arrival to its first admission. In each stint it is in ``prefill``
until it has computed what it had to, and in ``decode`` from then on: the first time that is until
its first token, after a preemption until it has its full blocks again. Between two stints it is
``preempted``. Only requests that have ended are in requests.jsonl, so only they have phases.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.prefix import prompts
from analysis.requests import preemption_bill, preemption_steps
from analysis.requests.preemptions import victims
from analysis.requests.stints import with_lookups
from analysis.tables import facts
from analysis.tables.session import Session

TABLE = "requests"

QUEUED, PREFILL, DECODE, PREEMPTED = "queued", "prefill", "decode", "preempted"

SHOWN = (
    "input_length",
    "output_length",
    "hit_tokens",
    "external_hit_tokens",
    "computed_tokens",
    "num_blocks",
    "preemptions",
    "finish_reason",
    "priority",
    "tenant",
    "lora",
)
"""What a trace says of a request, beside its phases."""

TRACED = ("trace_id", "parent_span_id")
"""The trace that a request's client put it into; null where none is known."""


@dataclass(frozen=True)
class Phases:
    """``requests``: a row for each request that ended. Columns: ``request`` (its number),
    ``engine``, ``request_id``, ``arrived_sec``, ``finish_sec``, and of requests.jsonl ``SHOWN``
    and ``TRACED``.

    ``spans``: a row for each phase, request by request, in the order of time. Columns: ``request``,
    ``phase``, ``begin_sec``, ``end_sec``, ``stint`` (its number; of the one before, where it was
    preempted; null while it was queued).

    ``preemptions``: a row for each preemption after which the request was admitted again. Columns:
    ``stint`` (that it ended), ``engine``, ``request_id``, ``recomputed`` (tokens),
    ``made_room_for`` (the request that got blocks next; null where the session does not show it),
    ``by_itself``.
    """

    requests: pl.DataFrame
    spans: pl.DataFrame
    preemptions: pl.DataFrame


def read(session: Session) -> Phases:
    """The phases of all requests of the session that have ended.

    Raises:
        SessionError: a table cannot be read.

    """
    known = prompts.read_without_contents(session)
    requests = _requests(session)
    stints = _stints(known.stints, requests)
    tally = preemption_steps.read(session)
    preempted = victims(with_lookups(session, known), known, session.begin_sec)
    priced = preemption_bill.measure(session, facts.read(session), preempted, tally)
    back = priced.select(
        order="next_stint", back_sec=pl.col("preempted_sec") + pl.col("lost_sec").fill_null(0)
    )
    spans = _spans(requests, stints.join(back, on="order", how="left"))
    return Phases(
        requests,
        spans,
        priced.select("stint", "engine", "request_id", "recomputed", "made_room_for", "by_itself"),
    )


def _requests(session: Session) -> pl.DataFrame:
    columns = ("timestamp", "engine", "request_id", "queue_sec", "first_token_sec", "finish_sec")
    parts = [
        batch.select(
            pl.col("engine").fill_null(0),
            pl.col("request_id").fill_null(""),
            "queue_sec",
            "first_token_sec",
            "finish_sec",
            *SHOWN,
            *TRACED,
            arrived_sec=pl.col("timestamp") / 1e3,
        )
        for batch in session.batches(TABLE, [*columns, *SHOWN, *TRACED], history=True)
    ]
    if not parts:
        parts = [pl.DataFrame(schema=_SCHEMA)]
    rows = pl.concat(parts).with_row_index("request").drop_nulls(["arrived_sec", "finish_sec"])
    return rows.filter(pl.col("finish_sec") >= session.begin_sec)


_SCHEMA = {
    "engine": pl.Int64,
    "request_id": pl.String,
    "queue_sec": pl.Float64,
    "first_token_sec": pl.Float64,
    "finish_sec": pl.Float64,
    **{name: pl.String if name in ("finish_reason", "lora") else pl.Int64 for name in SHOWN},
    **dict.fromkeys(TRACED, pl.String),
    "arrived_sec": pl.Float64,
}


def _stints(stints: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """The stints of these requests. One whose lookups were not recorded has one stint, from its
    admission to its end."""
    own = stints.join(requests.select("request"), on="request", how="semi")
    without = requests.join(own.select("request"), on="request", how="anti").drop_nulls("queue_sec")
    made_up = without.select(
        "request",
        order=pl.lit(None, pl.UInt32),
        begin_sec=pl.col("arrived_sec") + pl.col("queue_sec"),
        end_sec="finish_sec",
        first_token_sec="first_token_sec",
        last=pl.lit(value=True),
    )
    return pl.concat([own, made_up.select(own.columns).cast(own.schema)])


def _spans(requests: pl.DataFrame, stints: pl.DataFrame) -> pl.DataFrame:
    admitted = stints.group_by("request").agg(pl.col("begin_sec").min())
    queued = requests.join(admitted, on="request", how="left").select(
        "request",
        phase=pl.lit(QUEUED),
        stint=pl.lit(None, pl.UInt32),
        end_sec=pl.coalesce("begin_sec", "finish_sec"),
        begin_sec="arrived_sec",
    )
    begin, end, first = (pl.col(name) for name in ("begin_sec", "end_sec", "first_token_sec"))
    filled = (
        pl.when(first.is_null())
        .then(end)
        .when(first > begin)
        .then(first)
        .otherwise(pl.coalesce("back_sec", begin))
        .clip(begin, end)
    )
    parts = stints.with_columns(
        stint="order",
        filled_sec=filled,
        next_sec=begin.sort_by("begin_sec").shift(-1).over("request", order_by="begin_sec"),
    )
    prefill = parts.select(
        "request", "begin_sec", "stint", phase=pl.lit(PREFILL), end_sec="filled_sec"
    )
    decode = parts.select(
        "request", "end_sec", "stint", phase=pl.lit(DECODE), begin_sec="filled_sec"
    )
    preempted = parts.drop_nulls("next_sec").select(
        "request", "stint", phase=pl.lit(PREEMPTED), begin_sec="end_sec", end_sec="next_sec"
    )
    every = [part.select(_SPAN) for part in (queued, prefill, decode, preempted)]
    return (
        pl.concat(every)
        .filter((pl.col("phase") == QUEUED) | (pl.col("end_sec") > pl.col("begin_sec")))
        .with_columns(pl.max_horizontal("begin_sec", "end_sec").alias("end_sec"))
        .sort("request", "begin_sec", "end_sec")
    )


_SPAN = ("request", "phase", "begin_sec", "end_sec", "stint")
