# SPDX-License-Identifier: Apache-2.0
"""Which requests took blocks whose contents a request had held last?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.export.part import Part
from analysis.tables.session import Session

TABLE = "kv_cache_evictions"

MOST_TAKERS = 16
"""Takers that are named for one request: those that took the most of it."""

_ROWS = 1_000_000
"""Rows of who took from whom that are kept, before what is small is only counted."""

_OWNER = ("engine", "request_id")
_WHO = (*_OWNER, "by", "reason")


@dataclass(frozen=True)
class Evicted:
    """``takers``: who took blocks of whom. Columns: ``engine``, ``request_id`` (of the request that
    held them last), ``by`` (the request that needed the room; null where it is not known, or
    nobody did), ``reason``, ``at_sec`` of the first of them, ``blocks``.

    ``lost`` and ``taken``: all blocks by the request that held them last, and by the one that took
    them. Columns: ``engine``, ``request_id``, ``blocks``.
    """

    takers: pl.DataFrame
    lost: pl.DataFrame
    taken: pl.DataFrame


def read(session: Session, part: Part) -> Evicted:
    """What the requests of this part lost and took, within its limits of time.

    Raises:
        SessionError: the table cannot be read.

    """
    takers = pl.DataFrame(schema=_TAKERS)
    lost, taken = pl.DataFrame(schema=_COUNTED), pl.DataFrame(schema=_COUNTED)
    columns = ("timestamp_sec", "reason", "owner_request", "evicting_request", "engine")
    for batch in session.batches(TABLE, columns):
        rows = batch.filter(
            part.is_in(TABLE), part.names("owner_request", "evicting_request")
        ).select(
            pl.col("engine").fill_null(0),
            "reason",
            request_id="owner_request",
            by="evicting_request",
            at_sec="timestamp_sec",
            blocks=pl.lit(1, pl.Int64),
        )
        owned = rows.drop_nulls("request_id")
        by_others = rows.drop_nulls("by").select("engine", "blocks", request_id="by")
        takers = _added(pl.concat([takers, _by_whom(owned.select(takers.columns))]))
        lost = _counted(pl.concat([lost, _counted(owned)]))
        taken = _counted(pl.concat([taken, _counted(by_others)]))
    return Evicted(_largest(_by_whom(takers)), lost, taken)


_TAKERS = {
    "engine": pl.Int64,
    "request_id": pl.String,
    "by": pl.String,
    "reason": pl.String,
    "at_sec": pl.Float64,
    "blocks": pl.Int64,
}
_COUNTED = {"engine": pl.Int64, "request_id": pl.String, "blocks": pl.Int64}


def _by_whom(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.group_by(_WHO).agg(pl.col("at_sec").min(), pl.col("blocks").sum())


def _counted(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.group_by(_OWNER).agg(pl.col("blocks").sum())


def _added(takers: pl.DataFrame) -> pl.DataFrame:
    """The rows in as few as there need be, and in no more than fit."""
    if takers.height < _ROWS:
        return takers
    together = _by_whom(takers)
    return _largest(together) if together.height > _ROWS // 2 else together


def _largest(takers: pl.DataFrame) -> pl.DataFrame:
    return (
        takers.sort("blocks", "at_sec", "by", descending=[True, False, False])
        .group_by(_OWNER, maintain_order=True)
        .head(MOST_TAKERS)
    )
