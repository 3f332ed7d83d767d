# SPDX-License-Identifier: Apache-2.0
"""How can rows be summed up by text without a hash of each text?

Neighbouring rows of a table are often alike: one allocation evicts many blocks of one request. To
compare a row with the one before it is faster than to hash its text.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl


def summed_neighbours(rows: pl.DataFrame, columns: Sequence[str], **sums: pl.Expr) -> pl.DataFrame:
    """One row for all neighbouring rows that are alike in ``columns``: these columns, and ``sums``.

    Rows that are alike and no neighbours stay apart, so the result may have several rows that are
    alike in ``columns``. It has copies of the text, as ``own_text`` makes them.
    """
    changes = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in columns)
    return (
        rows.lazy()
        .with_columns(stretch=changes.cum_sum().set_sorted())
        .group_by("stretch")
        .agg(pl.col(columns).first(), **sums)
        .with_columns(own_text())
        .drop("stretch")
        .collect()
    )


def own_text() -> pl.Expr:
    """Copies of the text columns: without one, a few rows keep the text of all rows in memory."""
    return pl.col(pl.String) + ""
