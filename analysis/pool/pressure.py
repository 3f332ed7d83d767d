# SPDX-License-Identifier: Apache-2.0
"""How full was an engine's pool at a moment, and in which band of usage is that?

The bands are those of ``analysis.pool.usage.Bands``: under 40 %, to 60, 80 and 90 %, and over
90 %. The first pool counts where a model has several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import polars as pl

from analysis.pool.usage import Bands
from analysis.tables.session import Session

TABLE = "kv_cache_usage"

BANDS = tuple(field.name for field in fields(Bands))
"""The bands by name, the emptiest first."""

_STATES = {
    "micros": pl.Int64,
    "usage_pct": pl.Float32,
    "held": pl.Int32,
    "available": pl.Int32,
    "idle": pl.Boolean,
}


@dataclass(frozen=True)
class States:
    """Every state of every engine's pool, warm-up included, in the order of time.

    Columns: ``micros`` (since when, in microseconds), ``usage_pct``, ``held`` blocks, blocks that
    are ``available`` for allocation (cached and free ones), ``idle`` (no request ran or waited).
    """

    by_engine: Mapping[int, pl.DataFrame]

    def of(self, engine: int) -> pl.DataFrame:
        """The states of one engine's pool; empty for an engine without a row."""
        return self.by_engine.get(engine, pl.DataFrame(schema=_STATES))


def states(session: Session) -> States:
    """The states of the session's pools. They take 21 bytes for each row of the table.

    Raises:
        SessionError: the table cannot be read.

    """
    rows = session.collect(
        TABLE,
        lambda table: table.filter(pl.col("pool") == 0).select(
            pl.col("engine").cast(pl.Int32),
            micros("timestamp_sec"),
            pl.col("usage_pct").cast(pl.Float32),
            held=pl.col("num_blocks").cast(pl.Int32),
            available=(pl.col("cached_blocks") + pl.col("free_blocks")).cast(pl.Int32),
            idle=(pl.col("running_reqs") == 0) & (pl.col("waiting_reqs") == 0),
        ),
        history=True,
    )
    return States(
        {
            engine: part if part["micros"].is_sorted() else part.sort("micros", maintain_order=True)
            for engine, part in by_engine(rows).items()
        }
    )


def with_states(rows: pl.DataFrame, states: pl.DataFrame) -> pl.DataFrame:
    """The rows, each with the columns of the state at its moment; null before the first state.

    Args:
        rows: in the order of ``micros``, a column of theirs.
        states: of the same engine, from ``States.of``.

    """
    # A batch of rows needs few of the states of a long session.
    reached = states["micros"].search_sorted(
        pl.concat([rows["micros"].head(1), rows["micros"].tail(1)]), "right"
    )
    begin, end = (max(0, reached[0] - 1), reached[1]) if rows.height else (0, 0)
    return rows.join_asof(states.slice(begin, end - begin), on="micros")


def by_engine(rows: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """The rows of each engine, without the column ``engine``; none where that is null."""
    known = rows.drop_nulls("engine")
    parts = known.partition_by("engine", as_dict=True, include_key=False, maintain_order=True)
    return {int(key[0]): part for key, part in parts.items()}


def micros(column: str, unit: float = 1.0) -> pl.Expr:
    """A column of times in whole microseconds, as ``micros``.

    Args:
        column: the name of the column.
        unit: the seconds that the column's unit has.

    """
    return (pl.col(column) * (unit * 1e6)).round().cast(pl.Int64).alias("micros")


def band(usage: pl.Expr) -> pl.Expr:
    """The position in ``BANDS`` of a usage in percent; null where the usage is null."""
    return (
        pl.when(usage > 90)
        .then(4)
        .when(usage.is_null())
        .then(None)
        .otherwise(sum((usage >= floor).cast(pl.Int32) for floor in (40, 60, 80)))
    )
