# SPDX-License-Identifier: Apache-2.0
"""Which contents did each request consist of, and when did it run?

Only requests.jsonl has contents, and only requests that have ended are in it. A request has a
stint from each lookup that admitted it until it ends or is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import polars as pl

from analysis.tables import lookups
from analysis.tables.schema import TABLES
from analysis.tables.session import Session

TABLE = "requests"

ENGINES = 1024
"""A ``key`` has room for so many data-parallel ranks."""

KEY = pl.col("content_id") * ENGINES + pl.col("engine")
"""One number for a content on an engine. Content ids have 53 bits."""


@dataclass(frozen=True)
class Prompts:
    """What is known of the requests, warm-up included. Requests go by number: ``request``.

    ``asked``: one row for each lookup that counts (``analysis.tables.lookups.admitted``). Columns:
    ``lookup``; those of ``analysis.tables.lookups.COLUMNS``; ``order`` (place among all
    admissions); ``request`` (null where it has not ended, or its row has no contents);
    ``block_size`` (tokens); ``in_window`` (not in the warm-up); ``first_missed`` and
    ``full_blocks`` (the lookup missed the full blocks of the prompt from the first to before the
    second); ``ends_prompt`` (the last full block ends the prompt).

    ``stints``: one row for each stint, by ``order``. Columns: ``request``, ``order`` (of the
    admission), ``begin_sec``, ``end_sec``, ``first_token_sec`` (of the request), ``last`` (it is
    the last stint of its request).

    ``contents``: one row for each full block of each request, request by request, blocks of the
    answer after those of the prompt. Columns: ``key``, ``request``, ``index``, ``made`` (the
    request has computed or found it), ``in_prompt``.

    ``made``: one row for each request that has made a block. Columns: ``request``, ``engine``,
    ``blocks`` (how many).
    """

    asked: pl.DataFrame
    stints: pl.DataFrame
    contents: pl.DataFrame
    made: pl.DataFrame

    def without_contents(self) -> Prompts:
        """The same without the rows of ``contents``, which take most of the memory."""
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
_SHORT = tuple(name for name in COLUMNS if name not in _LISTS)


@dataclass
class PromptTally:
    """Keeps the requests, and a row for each of their full blocks."""

    requests: list[pl.DataFrame] = field(default_factory=list)
    contents: list[pl.DataFrame] = field(default_factory=list)
    count: int = 0

    def add(self, batch: pl.DataFrame) -> None:
        full = pl.col("input_length") // pl.col("block_size")
        has_contents = (pl.col("block_size") > 0) & (pl.col("hash_ids").list.len() >= full)
        numbered = (
            batch.select(COLUMNS)
            .with_columns(block_size=pl.when(has_contents).then("block_size"))
            .with_row_index("request", offset=self.count)
        )
        self.count += batch.height
        self.requests.append(numbered.select(pl.exclude(_LISTS)))
        self.contents.append(_contents(numbered))

    def result(self, session: Session) -> Prompts:
        """All of the session's requests. The tally is empty afterwards.

        Raises:
            SessionError: a table cannot be read.

        """
        known = TABLES[TABLE].columns
        schema = {name: known[name] for name in _SHORT}
        requests = pl.concat(
            [pl.DataFrame(schema={"request": pl.UInt32, **schema}), *self.requests]
        )
        contents = pl.concat([pl.DataFrame(schema=_CONTENTS), *self.contents])
        self.requests.clear()
        self.contents.clear()
        admissions = _admissions(session, requests)
        return Prompts(
            _asked(session, requests, admissions),
            _stints(session, admissions),
            contents,
            _made(contents),
        )


def read(session: Session) -> Prompts:
    """All requests of the session that have ended.

    Raises:
        SessionError: a table cannot be read.

    """
    tally = PromptTally()
    for batch in session.batches(TABLE, COLUMNS, history=True):
        tally.add(batch)
    return tally.result(session)


def read_without_contents(session: Session) -> Prompts:
    """The same requests, as ``read`` gives them, with ``contents`` and ``made`` empty.

    No list of contents is read, and those are most of requests.jsonl. Each request counts as one
    whose contents are known.

    Raises:
        SessionError: a table cannot be read.

    """
    tally = PromptTally()
    for batch in session.batches(TABLE, [*_SHORT], history=True):
        tally.requests.append(batch.with_row_index("request", offset=tally.count))
        tally.count += batch.height
    return tally.result(session)


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
    """Every lookup that led to an admission, in order, with the number of its request."""
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
    # A client may use a request id again. The request is the last one that had arrived by then.
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


def _stints(session: Session, admissions: pl.DataFrame) -> pl.DataFrame:
    stints = admissions.drop_nulls("request").with_columns(
        next_sec=pl.col("timestamp_sec").shift(-1).over("request")
    )
    return (
        _with_preemptions(session, stints)
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


def _with_preemptions(session: Session, stints: pl.DataFrame) -> pl.DataFrame:
    """The stints with the time of their preemption, when vLLM freed the request's blocks."""
    names = ["engine", "request_id"]
    preempted = stints.filter(pl.col("next_sec").is_not_null()).select(names).unique()
    if preempted.is_empty():
        return stints.with_columns(preempted_sec=pl.lit(None, pl.Float64))
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
        stints.sort("next_sec")
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
