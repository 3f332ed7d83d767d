# SPDX-License-Identifier: Apache-2.0
"""How are the columns of a table stored in Parquet, and how do they become what they were?

Numbers with digits behind the point are decimals, so their text comes back as it was, and they
take half the room of floats. Most ids of ``prefix_ids`` are in ``hash_ids`` of the same row:
instead of such an id its *place* there is stored, as -1 less the place, counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from analysis.tables.schema import Table

MOST_DECIMALS = 9
_DIGITS = 18

PLACED, PLACES_IN = "prefix_ids", "hash_ids"
"""Ids of the first column are stored as places in the second one, where they are there."""

_UNITS = {
    "_sec": "s",
    "_us": "us",
    "_pct": "%",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_length": "tokens",
    "_blocks": "blocks",
    "_reqs": "requests",
    "_count": "times",
}


def unit(table: Table, column: str) -> str:
    """The unit of a column's values; empty where it counts or names."""
    if column == table.time and table.time_unit == 1e-3:
        return "ms"
    return next((unit for end, unit in _UNITS.items() if column.endswith(end)), "")


def kinds(
    table: Table, columns: Sequence[str], decimals: Mapping[str, int], appended: Sequence[str] = ()
) -> dict[str, pl.DataType | type[pl.DataType]]:
    """The types of all columns in the file.

    Args:
        table: the table.
        columns: those of the table that the file has: an older release has fewer.
        decimals: digits behind the point, of the columns that are stored as decimals.
        appended: columns of a newer release, which are stored as text.

    """
    known: dict[str, pl.DataType | type[pl.DataType]] = {
        name: pl.Decimal(_DIGITS, decimals[name]) if name in decimals else table.columns[name]
        for name in columns
    }
    return {**known, **dict.fromkeys(appended, pl.String)}


def places_apply(table: Table) -> bool:
    """Whether the table has ids that are stored as places."""
    return {PLACED, PLACES_IN} <= {*table.columns}


def decimals_of(texts: pl.Series) -> int | None:
    """How many digits behind the point each number of a column has, as it is written; None where
    they differ, or are too many for a decimal."""
    written = texts.drop_nulls()
    if written.is_empty():
        return 6
    if not written.str.contains(r"^-?\d{1,12}(\.\d+)?$").all():
        return None
    digits = written.str.extract(r"\.(\d+)$").str.len_chars().fill_null(0)
    least, most = int(digits.min() or 0), int(digits.max() or 0)  # type: ignore[arg-type]
    return most if least == most <= MOST_DECIMALS else None


def is_exact(numbers: pl.Series, decimals: int) -> bool:
    """Whether numbers are the same as decimals with so many digits behind the point."""
    known = numbers.drop_nulls()
    if not known.is_between(-1e12, 1e12).all():
        return False
    again = known.round(decimals).cast(pl.Decimal(_DIGITS, decimals)).cast(pl.Float64)
    return bool((again == known).all())


def as_decimals(rows: pl.DataFrame, decimals: Mapping[str, int]) -> pl.DataFrame:
    """Rows as they were read, with decimals in place of floats.

    Raises:
        PolarsError: a number is too large.

    """
    return rows.with_columns(
        pl.col(name).round(digits).cast(pl.Decimal(_DIGITS, digits))
        for name, digits in decimals.items()
    )


def with_places(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with places instead of ids, where ``PLACES_IN`` has the id."""
    numbered = rows.select(pl.int_range(pl.len()).alias("row"), PLACES_IN, PLACED)
    there = (
        _exploded(numbered, PLACES_IN)
        .with_columns(pl.int_range(pl.len()).over("row").alias("place"))
        .unique(["row", PLACES_IN], keep="first", maintain_order=True)
    )
    placed = (
        _exploded(numbered, PLACED)
        .join(
            there,
            left_on=["row", PLACED],
            right_on=["row", PLACES_IN],
            how="left",
            maintain_order="left",
        )
        .with_columns(pl.coalesce(-1 - pl.col("place"), PLACED).alias(PLACED))
    )
    return _with_lists(rows, numbered, placed)


def with_ids(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with ids in place of places.

    Raises:
        PolarsError: a place is beyond the ids of its row.

    """
    numbered = rows.select(pl.int_range(pl.len()).alias("row"), PLACES_IN, PLACED)
    ids = _exploded(numbered, PLACES_IN)[PLACES_IN]
    counts = numbered[PLACES_IN].list.len().fill_null(0).cast(pl.Int64)
    begins = numbered.select("row").with_columns(
        (counts.cum_sum() - counts).alias("begin"), counts.alias("count")
    )
    stored = _exploded(numbered, PLACED).join(begins, on="row", how="left", maintain_order="left")
    is_place = stored[PLACED].fill_null(0) < 0
    places = -1 - stored[PLACED]
    if (is_place & (places >= stored["count"])).any():
        raise pl.exceptions.ComputeError(f"{PLACED} has a place that is not in {PLACES_IN}")
    where = (stored["begin"] + places).set(~is_place, None)
    found = ids.gather(where.fill_null(0)) if len(ids) else pl.Series([None], dtype=pl.Int64)
    chosen = pl.when(is_place).then(found).otherwise(stored[PLACED])
    return _with_lists(rows, numbered, stored.with_columns(chosen.alias(PLACED)))


def _exploded(numbered: pl.DataFrame, column: str) -> pl.DataFrame:
    """A row for each element of the lists; none for an empty list or for no list."""
    filled = numbered.select("row", column).filter(pl.col(column).list.len() > 0)
    return filled.explode(column)


def _with_lists(rows: pl.DataFrame, numbered: pl.DataFrame, elements: pl.DataFrame) -> pl.DataFrame:
    """The rows with lists of these elements; an empty list, or none, stays as it is."""
    lists = elements.group_by("row", maintain_order=True).agg(PLACED)
    found = numbered.select("row", pl.col(PLACED).alias("before")).join(
        lists, on="row", how="left", maintain_order="left"
    )
    chosen = pl.coalesce(PLACED, "before").alias(PLACED)
    return rows.with_columns(found.select(chosen).to_series())
