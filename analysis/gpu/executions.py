# SPDX-License-Identifier: Apache-2.0
"""What did the model execute: which batches, in which mode, how often?

The timeline has a row for each execution, so perhaps tens of millions. Batches of the same
descriptor and size are alike for every question here, so they become one row.
"""

from __future__ import annotations

import polars as pl

from analysis.tables.schema import TABLES
from analysis.tables.session import Session

TABLE = "cuda_graph_timeline"

DESCRIPTOR = ("runtime_mode", "num_tokens", "num_reqs", "uniform", "has_lora")
"""The batch descriptor, by which vLLM chooses a graph. ``num_tokens`` are padded."""

NONE = "NONE"
"""The mode of an execution without a graph."""

_PARTS = 64
"""How many sums of batches are kept before they become one."""


def read(session: Session) -> pl.DataFrame:
    """A row for all executions that are alike, those in the warm-up included.

    Columns: those of ``DESCRIPTOR``, ``worker``, ``unpadded_tokens``, ``dummy``, ``in_window``
    (not in the warm-up), ``in_graph`` (it replayed a graph), ``executions`` (how many),
    ``launch_us`` (their sum, in microseconds), ``gpu_us`` (the sum over ``gpu_timed`` executions).

    Raises:
        SessionError: the table cannot be read.

    """
    columns = TABLES[TABLE].columns
    parts = [_added_up(pl.DataFrame(schema=columns), session.begin_sec)]
    for batch in session.batches(TABLE, list(columns), history=True):
        parts.append(_added_up(batch, session.begin_sec))
        if len(parts) == _PARTS:
            parts = [_merged(parts)]
    return _merged(parts)


def _added_up(rows: pl.DataFrame, begin_sec: float) -> pl.DataFrame:
    return (
        rows.lazy()
        .group_by(
            *DESCRIPTOR,
            "worker",
            "unpadded_tokens",
            dummy=pl.col("dummy") > 0,
            in_window=pl.col("timestamp_sec") >= begin_sec,
            # Without the count the mode has to do.
            in_graph=(pl.col("runtime_mode") != NONE) & (pl.col("num_graphs").fill_null(1) > 0),
        )
        .agg(
            executions=pl.len().cast(pl.Int64),
            launch_us=pl.col("launch_us").sum(),
            gpu_us=pl.col("gpu_us").sum(),
            gpu_timed=pl.col("gpu_us").count().cast(pl.Int64),
        )
        .collect()
    )


def _merged(parts: list[pl.DataFrame]) -> pl.DataFrame:
    added = ("executions", "launch_us", "gpu_us", "gpu_timed")
    return pl.concat(parts).group_by(pl.exclude(*added)).agg(pl.col(*added).sum())


def observed(executions: pl.DataFrame) -> pl.DataFrame:
    """The executions that served requests after the warm-up, with the columns of ``read``."""
    return executions.filter(~pl.col("dummy") & pl.col("in_window"))
