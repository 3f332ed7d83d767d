# SPDX-License-Identifier: Apache-2.0
"""How do the rows of a table look as text, as the collector writes them?

A table that was written otherwise does not come out of here as it was; whoever relies on that
compares. Rows are frames with the types of ``analysis.tables.stored``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import polars as pl

_SAFE = r"^[ !#-\[\]-~]*$"
"""Text that JSON has as it is."""
_SMALLEST = 1e-4
"""Python writes smaller numbers with an exponent."""


def csv_rows(rows: pl.DataFrame) -> bytes:
    """The rows as lines of CSV, without a header."""
    return rows.write_csv(include_header=False).encode()


def json_rows(rows: pl.DataFrame, keys: Sequence[str]) -> bytes:
    """The rows as lines of JSON, each with these keys in this order."""
    if rows.is_empty():
        return b""
    parts: list[pl.Expr] = []
    for number, key in enumerate(keys):
        parts += [pl.lit(f'{"," if number else "{"}"{key}":'), _json_cell(rows[key])]
    lines = rows.select(pl.concat_str([*parts, pl.lit("}\n")]).alias("line"))["line"]
    return "".join(lines).encode()


def _json_cell(values: pl.Series) -> pl.Expr:
    kind = values.dtype
    if kind == pl.String:
        texts = _quoted(values)
    elif isinstance(kind, pl.List):
        inner = values.cast(pl.List(pl.String)).list.eval(pl.element().fill_null("null"))
        texts = _around("[", inner.list.join(","), "]")
    elif isinstance(kind, pl.Decimal) or kind == pl.Float64:
        texts = _shortest(values)
    else:
        texts = values.cast(pl.String)
    return pl.lit(texts.fill_null("null"))


def _quoted(values: pl.Series) -> pl.Series:
    if values.str.contains(_SAFE).all():
        return _around('"', values, '"')
    escaped: pl.Series = values.map_elements(json.dumps, return_dtype=pl.String)
    return escaped


def _around(before: str, texts: pl.Series, after: str) -> pl.Series:
    cells = pl.concat_str([pl.lit(before), texts, pl.lit(after)])
    return pl.select(cells).to_series()


def _shortest(values: pl.Series) -> pl.Series:
    """Numbers in as few digits as they need, and at least one behind the point."""
    texts: pl.Series = values.cast(pl.String)
    if isinstance(values.dtype, pl.Decimal):
        texts = texts.str.strip_chars_end("0")
        ends_in_point = texts.str.ends_with(".").fill_null(False)
        whole = pl.when(ends_in_point).then(texts + "0").otherwise(texts)
        texts = pl.select(whole).to_series()
    numbers = values.cast(pl.Float64)
    odd = ((numbers.abs() < _SMALLEST) & (numbers != 0)) | texts.str.contains("e", literal=True)
    if not odd.any():
        return texts
    written = numbers.map_elements(repr, return_dtype=pl.String)
    chosen = pl.when(odd).then(written).otherwise(texts)
    return pl.select(chosen).to_series()


def keys_of(line: bytes) -> tuple[str, ...]:
    """The keys of a line of JSON; none where it is no object, or a key is no plain word.

    >>> keys_of(b'{"a": 1, "b": []}')
    ('a', 'b')
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(row, dict) or not all(re.fullmatch(r"[a-z_]{1,40}", key) for key in row):
        return ()
    return tuple(row)
