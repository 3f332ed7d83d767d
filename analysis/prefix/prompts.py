# SPDX-License-Identifier: Apache-2.0
"""Which contents did each request consist of, and when did it run?

Contents are told by requests.jsonl alone, so requests that had not ended are not in it. A
request runs from the lookup that admitted it until it ends or is preempted; a request that was
preempted has several runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import polars as pl

from analysis.tables import lookups
from analysis.tables.schema import TABLES
from analysis.tables.session import Session

TABLE = "requests"

ENGINES = 1024
"""Data-parallel ranks that ``key`` tells apart."""

KEY = pl.col("content_id") * ENGINES + pl.col("engine")
"""One number for a content on an engine: content ids have 53 bits."""


@dataclass(frozen=True)
class Prompts:
    """What is known of the requests.

    ``asked``: one row for each true lookup of the session, its history included: ``lookup``,
    the columns of ``analysis.tables.lookups.COLUMNS``, ``order`` (of admissions), ``block_size``,
    ``in_window``; the prompt's full blocks that were not found are those from ``first_missed`` to
    before ``full_blocks``, of which the last one ``ends_prompt`` where that is true. ``request``
    is null where the request has not ended, or its row does not tell its contents.
    ``runs``: ``request``, ``order``, ``begin_sec``, ``end_sec``, ``first_token_sec``, ``last``
    (it is the request's last one), one row a run.
    ``contents``: ``key``, ``request``, ``index`` of every full block of every request, output
    blocks after those of the prompt, ``made`` (the request has computed it), ``in_prompt``;
    request by request.
    ``made``: ``request``, ``engine`` and how many ``blocks`` it has computed, if any.
    """

    asked: pl.DataFrame
    runs: pl.DataFrame
    contents: pl.DataFrame
    made: pl.DataFrame

    def without_contents(self) -> Prompts:
        """The same, without what takes most of the memory."""
        return replace(self, contents=self.contents.clear())


COLUMNS = (
    "timestamp",
    "engine",
    "request_id",
    "block_size",
    "input_length",
    "output_length",
    "computed_tokens",
    "first_token_sec",
    "finish_sec",
    "hash_ids",
    "output_hash_ids",
)
"""Of requests.jsonl."""

_LISTS = ("hash_ids", "output_hash_ids")


@dataclass
class PromptTally:
    """The requests seen so far, without their contents; and their contents."""

    requests: list[pl.DataFrame] = field(default_factory=list)
    contents: list[pl.DataFrame] = field(default_factory=list)
    count: int = 0

    def add(self, batch: pl.DataFrame) -> None:
        full = pl.col("input_length") // pl.col("block_size")
        told = (pl.col("block_size") > 0) & (pl.col("hash_ids").list.len() >= full)
        numbered = (
            batch.select(COLUMNS)
            .with_columns(block_size=pl.when(told).then("block_size"))
            .with_row_index("request", offset=self.count)
        )
        self.count += batch.height
        self.requests.append(numbered.select(pl.exclude(_LISTS)))
        self.contents.append(_contents(numbered))

    def result(self, session: Session) -> Prompts:
        """The prompts, outputs and runs of the requests, which are all of the session.

        Raises:
            SessionError: a table cannot be read.

        """
        known = TABLES[TABLE].columns
        schema = {name: known[name] for name in COLUMNS if name not in _LISTS}
        requests = pl.concat(
            [pl.DataFrame(schema={"request": pl.UInt32, **schema}), *self.requests]
        )
        contents = pl.concat([pl.DataFrame(schema=_CONTENTS), *self.contents])
        self.requests.clear()
        self.contents.clear()
        admissions = _admissions(session, requests)
        return Prompts(
            _asked(session, requests, admissions),
            _runs(session, admissions),
            contents,
            _made(contents),
        )


def read(session: Session) -> Prompts:
    """The prompts, outputs and runs of all requests of the session, warm-up included.

    Raises:
        SessionError: a table cannot be read.

    """
    collected = PromptTally()
    for batch in session.batches(TABLE, COLUMNS, history=True):
        collected.add(batch)
    return collected.result(session)


def _asked(session: Session, requests: pl.DataFrame, admissions: pl.DataFrame) -> pl.DataFrame:
    found = pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0)
    size = pl.col("block_size")
    return (
        lookups.admitted(session, history=True)
        .join(
            admissions.select("timestamp_sec", "engine", "request_id", "order", "request"),
            on=["timestamp_sec", "engine", "request_id"],
            how="left",
            maintain_order="left",
        )
        .join(requests.select("request", "block_size"), on="request", how="left")
        .with_columns(
            request=pl.when(size.is_not_null()).then("request"),
            in_window=pl.col("timestamp_sec") >= session.begin_sec,
            first_missed=found // size,
            full_blocks=pl.col("query_tokens") // size,
            ends_prompt=pl.col("query_tokens") % size == 0,
        )
        .sort("lookup")
    )


_CONTENTS = {
    "key": pl.Int64,
    "request": pl.UInt32,
    "index": pl.UInt32,
    "made": pl.Boolean,
    "in_prompt": pl.Boolean,
}


def _contents(requests: pl.DataFrame) -> pl.DataFrame:
    size = pl.col("block_size")
    full = pl.col("input_length") // size
    ids = pl.concat_list(
        pl.col("hash_ids").fill_null([]).list.head(full), pl.col("output_hash_ids").fill_null([])
    )
    computed = pl.coalesce("computed_tokens", pl.col("input_length") + pl.col("output_length") - 1)
    return (
        requests.lazy()
        .select(
            "request",
            "engine",
            content_id=ids,
            index=pl.int_ranges(0, ids.list.len(), dtype=pl.UInt32),
            prompt_blocks=full,
            made_blocks=computed // size,
        )
        .explode("content_id", "index", empty_as_null=False)
        .select(
            key=KEY,
            request="request",
            index="index",
            made=pl.col("index") < pl.col("made_blocks"),
            in_prompt=pl.col("index") < pl.col("prompt_blocks"),
        )
        .drop_nulls("key")
        .collect()
    )


def _made(contents: pl.DataFrame) -> pl.DataFrame:
    return (
        contents.lazy()
        .filter("made")
        .with_columns(pl.col("request").set_sorted())
        .group_by("request")
        .agg(engine=pl.col("key").first() % ENGINES, blocks=pl.len().cast(pl.Int64))
        .collect()
    )


def _admissions(session: Session, requests: pl.DataFrame) -> pl.DataFrame:
    """Every lookup after which a request ran, in order, with the request's number."""
    rows = session.collect(
        lookups.TABLE,
        lambda table: table.filter(pl.col("admitted") == 1).select(
            "timestamp_sec", "engine", "request_id"
        ),
        history=True,
    ).with_row_index("order")
    arrived = requests.select(
        "engine",
        "request_id",
        "request",
        "first_token_sec",
        "finish_sec",
        arrived_sec=pl.col("timestamp") / 1e3 - 1e-3,
    ).sort("arrived_sec")
    # A client can use a request id again: the request is the last one that had arrived by then.
    return (
        rows.sort("timestamp_sec", "order")
        .join_asof(
            arrived,
            left_on="timestamp_sec",
            right_on="arrived_sec",
            by=["engine", "request_id"],
            check_sortedness=False,
        )
        .with_columns(
            request=pl.when(pl.col("timestamp_sec") <= pl.col("finish_sec")).then("request")
        )
        .sort("order")
    )


def _runs(session: Session, admissions: pl.DataFrame) -> pl.DataFrame:
    runs = admissions.drop_nulls("request").with_columns(
        next_sec=pl.col("timestamp_sec").shift(-1).over("request")
    )
    return (
        _with_preemptions(session, runs)
        .select(
            "request",
            "order",
            begin_sec="timestamp_sec",
            end_sec=pl.coalesce("preempted_sec", "next_sec", "finish_sec"),
            first_token_sec="first_token_sec",
            last=pl.col("next_sec").is_null(),
        )
        .sort("order")
    )


def _with_preemptions(session: Session, runs: pl.DataFrame) -> pl.DataFrame:
    """The runs with when they were preempted: that is when their blocks were freed."""
    names = ["engine", "request_id"]
    preempted = runs.filter(pl.col("next_sec").is_not_null()).select(names).unique()
    if preempted.is_empty():
        return runs.with_columns(preempted_sec=pl.lit(None, pl.Float64))
    frees = session.collect(
        "kv_cache_allocations",
        lambda table: (
            table.filter(pl.col("event") == "free")
            .select(*names, preempted_sec="timestamp_sec")
            .join(preempted.lazy(), on=names, how="semi")
        ),
        history=True,
    )
    return (
        runs.sort("next_sec")
        .join_asof(
            frees.sort("preempted_sec"),
            left_on="next_sec",
            right_on="preempted_sec",
            by=names,
            allow_exact_matches=False,
            check_sortedness=False,
        )
        .with_columns(
            preempted_sec=pl.when(pl.col("preempted_sec") > pl.col("timestamp_sec")).then(
                "preempted_sec"
            )
        )
    )
