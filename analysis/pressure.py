# SPDX-License-Identifier: Apache-2.0
"""How full was an engine's pool at this moment, and which of the guide's bands is that?

Of a model with several pools the first one counts.
"""

from __future__ import annotations

from dataclasses import fields

import polars as pl

from analysis.session import Session
from analysis.usage import Bands

TABLE = "kv_cache_usage"

BANDS = tuple(field.name for field in fields(Bands))
"""The bands by name, the emptiest first."""


def states(session: Session) -> pl.DataFrame:
    """``engine``, ``micros``, ``usage_pct`` and ``available`` (blocks that can be handed out) of
    every row of the table, warm-up included: the last one at or before a moment is its state.

    Raises:
        SessionError: the table cannot be read.

    """
    return session.collect(
        TABLE,
        lambda table: table.filter(pl.col("pool") == 0).select(
            "engine",
            micros("timestamp_sec"),
            pl.col("usage_pct").cast(pl.Float32),
            available=(pl.col("cached_blocks") + pl.col("free_blocks")).cast(pl.Int32),
        ),
        history=True,
    ).sort("micros", maintain_order=True)


def micros(column: str, unit: float = 1.0) -> pl.Expr:
    """A column of seconds, or of so many seconds' ``unit``, in whole microseconds."""
    return (pl.col(column) * (unit * 1e6)).round().cast(pl.Int64).alias("micros")


def band(usage: pl.Expr) -> pl.Expr:
    """The position in ``BANDS`` of a usage in percent; null where it is not known."""
    return (
        pl.when(usage > 90)
        .then(4)
        .when(usage.is_null())
        .then(None)
        .otherwise(sum((usage >= floor).cast(pl.Int32) for floor in (40, 60, 80)))
    )
