# SPDX-License-Identifier: Apache-2.0
"""By whom does each request come: which salt, adapter, priority, API server, engine, label?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import polars as pl

from analysis.tables import labels
from analysis.tables.labels import Label

By = Literal["salt", "lora", "priority", "api-server", "engine", "label"]
EVERY: tuple[By, ...] = get_args(By)

COLUMNS = (
    "timestamp",
    "engine",
    "request_id",
    "input_length",
    "output_length",
    "lora",
    "tenant",
    "priority",
    "api_server",
    "queue_sec",
    "first_token_sec",
    "preemptions",
    "draft_tokens",
    "accepted_tokens",
)
"""Of requests.jsonl."""

VALUE, NONE, NOT_KNOWN = 0, 1, 2
"""Kinds of a key: it has a name; the request has none; what has no request, or one that had not
ended."""

NAME = ["engine", "request_id"]


@dataclass
class AskerTally:
    """Keeps who asked. It needs all rows of requests.jsonl."""

    begin_sec: float
    parts: list[pl.DataFrame] = field(default_factory=list)
    count: int = 0

    def add(self, batch: pl.DataFrame) -> None:
        arrived = pl.col("timestamp") / 1e3
        self.parts.append(
            batch.select(COLUMNS)
            .with_row_index("request", offset=self.count)
            .select(
                "request",
                *NAME,
                "input_length",
                "output_length",
                "preemptions",
                pl.col("draft_tokens", "accepted_tokens").fill_null(0),
                "lora",
                pl.col("tenant", "priority", "api_server").cast(pl.String),
                queued="queue_sec",
                first_token=(pl.col("first_token_sec") - arrived).clip(0),
                counts=arrived >= self.begin_sec,
            )
        )
        self.count += batch.height

    def result(self, rules: Iterable[Label]) -> Askers:
        """All of them. The tally is empty afterwards."""
        rows = pl.concat([pl.DataFrame(schema=_SCHEMA), *self.parts])
        self.parts.clear()
        return Askers(rows, tuple(rules))


_SCHEMA = {
    "request": pl.UInt32,
    "engine": pl.Int64,
    "request_id": pl.String,
    "input_length": pl.Int64,
    "output_length": pl.Int64,
    "preemptions": pl.Int64,
    "draft_tokens": pl.Int64,
    "accepted_tokens": pl.Int64,
    "lora": pl.String,
    "tenant": pl.String,
    "priority": pl.String,
    "api_server": pl.String,
    "queued": pl.Float64,
    "first_token": pl.Float64,
    "counts": pl.Boolean,
}


@dataclass(frozen=True)
class Askers:
    """``requests``: a row for each request that has ended, warm-up included.

    Columns: ``request`` (its number), ``engine``, ``request_id``, ``input_length`` and
    ``output_length`` (tokens), ``preemptions``, ``draft_tokens`` and ``accepted_tokens``; ``lora``,
    ``tenant``, ``priority`` and ``api_server`` as text; ``queued`` and ``first_token`` (seconds
    since its arrival); ``counts`` (it arrived after the warm-up). ``rules``: the user's labels.
    """

    requests: pl.DataFrame
    rules: tuple[Label, ...]

    def by_name(self, figures: pl.DataFrame) -> pl.DataFrame:
        """Figures of requests that the tables name, with the number ``request`` of each, null where
        none of this name has ended.

        A client may use a request id again. The last one of these requests counts.
        """
        last = self.requests.unique(NAME, keep="last").select(*NAME, "request")
        return figures.join(last, on=NAME, how="left")

    def keyed(self, figures: pl.DataFrame, by: By) -> pl.DataFrame:
        """Figures with ``kind`` and ``key``: by whom each is.

        Args:
            figures: with the columns ``request``, ``engine`` and ``request_id``, each of which may
                be null.
            by: which key.

        """
        if by == "engine":
            return figures.with_columns(
                _kind(pl.col("engine").is_not_null(), pl.col("engine").is_not_null()),
                key=pl.col("engine").cast(pl.String),
            )
        if by == "label":
            ids = figures["request_id"].drop_nulls().unique()
            named = labels.names(self.rules, ids)
            table = pl.DataFrame(
                {"request_id": list(named), "key": list(named.values())},
                schema={"request_id": pl.String, "key": pl.String},
            )
            has_id = pl.col("request_id").is_not_null() & (pl.col("request_id") != "")
            return figures.join(table, on="request_id", how="left").with_columns(
                _kind(has_id, pl.col("key").is_not_null())
            )
        column = {"salt": "tenant", "api-server": "api_server"}.get(by, by)
        has_ended = pl.col("request").is_not_null()
        # Sessions of earlier releases do not have it.
        is_known = has_ended & pl.col("key").is_not_null() if by == "api-server" else has_ended
        return figures.join(
            self.requests.select("request", key=column), on="request", how="left"
        ).with_columns(_kind(is_known, pl.col("key").is_not_null()))


def _kind(is_known: pl.Expr, has_key: pl.Expr) -> pl.Expr:
    return (
        pl.when(~is_known)
        .then(pl.lit(NOT_KNOWN))
        .when(has_key)
        .then(pl.lit(VALUE))
        .otherwise(pl.lit(NONE))
        .alias("kind")
    )
