# SPDX-License-Identifier: Apache-2.0
"""Which graphs were captured, when, and for what?"""

from __future__ import annotations

import polars as pl

from analysis.tables.session import Session

TABLE = "cuda_graph_captures"

MODEL = pl.col("part").fill_null("model") == "model"
"""The graph is one of the model itself, and not of a drafter or an encoder."""


def read(session: Session) -> pl.DataFrame:
    """Every capture of the session, in the order of time, with the columns of its table.

    Raises:
        SessionError: the table cannot be read.

    """
    return session.collect(TABLE, lambda table: table, history=True).sort("capture_time_sec")


def without_trials(captures: pl.DataFrame) -> pl.DataFrame:
    """The captures without trial ones, which start-up makes to estimate memory and throws away.

    The columns stay the same.
    """
    return captures.filter(pl.col("kind") != "profiling")


def sizes(captures: pl.DataFrame) -> pl.DataFrame:
    """A row for each size that a worker has a graph of the model for, without trial captures.

    Columns: ``worker``, ``num_tokens`` (padded tokens); sorted by both.
    """
    of_model = without_trials(captures).filter(MODEL).select("worker", "num_tokens")
    return of_model.drop_nulls().unique().sort("worker", "num_tokens")
