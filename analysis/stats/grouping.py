# SPDX-License-Identifier: Apache-2.0
"""How can rows be summed up by text without looking each text up?

Rows of the tables come in runs: one allocation evicts many blocks that one request let go. Telling
where a run ends takes a comparison with the row before, which is faster than a hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl


def in_runs(rows: pl.DataFrame, columns: Sequence[str], **sums: pl.Expr) -> pl.DataFrame:
    """These columns of every run of rows that are alike in them, and sums over it."""
    changes = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in columns)
    return (
        rows.lazy()
        .with_columns(run=changes.cum_sum().set_sorted())
        .group_by("run")
        .agg(pl.col(columns).first(), **sums)
        .with_columns(own_text())
        .drop("run")
        .collect()
    )


def own_text() -> pl.Expr:
    """The columns of text, copied: a few rows of many would keep the text of all in memory."""
    return pl.col(pl.String) + ""
