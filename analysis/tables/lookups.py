# SPDX-License-Identifier: Apache-2.0
"""Which lookup counts for each admitted request?

The lookup that led to its admission counts. There may be two of them where a KV transfer failed
and left the request's blocks empty: then the last one counts. If a client uses a request id again,
that is another request.
"""

from __future__ import annotations

import polars as pl

from analysis.tables.session import Session

TABLE = "prefix_cache_lookups"

FRESH = pl.col("kind").is_in(["first", "retry"])
"""The lookup is of a request that has not been preempted and may read the cache."""

COLUMNS = (
    "timestamp_sec",
    "engine",
    "request_id",
    "query_tokens",
    "hit_tokens",
    "external_hit_tokens",
)


def admitted(session: Session, *, history: bool = False) -> pl.DataFrame:
    """A row for each admitted request, in the table's order.

    Columns: ``lookup`` (a number from 0 on), and those of ``COLUMNS``, as in the table.

    Args:
        session: the session.
        history: include the warm-up.

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
