# SPDX-License-Identifier: Apache-2.0
"""Which lookup counted for each admitted request?

The one that led to its admission. There can be two where a request's blocks were handed out and
then not filled (a failed KV transfer): the last one counts. A client that uses a request id again
has made another request.
"""

from __future__ import annotations

import polars as pl

from analysis.tables.session import Session

TABLE = "prefix_cache_lookups"

FRESH = pl.col("kind").is_in(["first", "retry"])
"""Lookups of requests that have not been preempted and may read the cache."""

COLUMNS = (
    "timestamp_sec",
    "engine",
    "request_id",
    "query_tokens",
    "hit_tokens",
    "external_hit_tokens",
)


def admitted(session: Session, *, history: bool = False) -> pl.DataFrame:
    """One row for each admitted request: ``lookup`` (its number, in the table's order) and
    ``COLUMNS``.

    Raises:
        SessionError: the table cannot be read.

    """
    fresh = session.collect(
        TABLE,
        lambda table: table.filter(FRESH).select(*COLUMNS, "kind", "admitted"),
        history=history,
    )
    return (
        fresh.with_columns(life=(pl.col("kind") == "first").cum_sum().over("engine", "request_id"))
        .filter(pl.col("admitted") == 1)
        .unique(["engine", "request_id", "life"], keep="last", maintain_order=True)
        .with_row_index("lookup")
        .select("lookup", *COLUMNS)
    )
