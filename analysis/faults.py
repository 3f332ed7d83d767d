# SPDX-License-Identifier: Apache-2.0
"""Where is a table malformed? Called only once reading it has failed, so it may take its time."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from analysis.tables import Table


def first_fault(path: Path, table: Table, end: int) -> tuple[int, str] | None:
    """The number of the first malformed line before the byte ``end`` and what is wrong with it,
    or None."""
    width = position = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            position += len(raw)
            if position > end:
                break
            if table.is_csv and number == 1:
                width = raw.count(b",") + 1
                continue
            fault = next(_faults(raw, table, width), None)
            if fault:
                return number, fault
    return None


def _faults(raw: bytes, table: Table, width: int) -> Iterator[str]:
    try:
        line = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        yield f"not UTF-8 text (byte {error.start + 1})"
        return
    if "\0" in line:
        yield "not text (a NUL byte)"
        return
    yield from _csv_faults(line, table, width) if table.is_csv else _json_faults(line, table)


def _csv_faults(line: str, table: Table, width: int) -> Iterator[str]:
    try:
        fields = next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        yield f"not CSV ({error})"
        return
    if not len(table.columns) <= len(fields) <= width:
        yield f"{len(fields)} fields instead of {width}"
    for (column, dtype), field in zip(table.columns.items(), fields, strict=False):
        if not field:
            if column in table.required:
                yield f"{column} is empty"
        elif not _reads_as(field, dtype):
            yield f"{column} is {_shown(field)}, not {_kind(dtype)}"


def _reads_as(field: str, dtype: Any) -> bool:
    try:
        if dtype == pl.Int64:
            int(field)
        elif dtype == pl.Float64:
            float(field)
    except ValueError:
        return False
    return True


def _json_faults(line: str, table: Table) -> Iterator[str]:
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except ValueError as error:
        yield f"not JSON ({error})"
        return
    if not isinstance(row, Mapping):
        yield "not a JSON object"
        return
    for column, dtype in table.columns.items():
        value = row.get(column)
        if value is None:
            if column in table.required:
                yield f"{column} is missing"
        elif not _is(value, dtype):
            yield f"{column} is {_shown(json.dumps(value))}, not {_kind(dtype)}"


def _is(value: Any, dtype: Any) -> bool:
    if isinstance(dtype, pl.List):
        return isinstance(value, list) and all(_is(item, dtype.inner) for item in value)
    if dtype == pl.String:
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (dtype == pl.Float64 and isinstance(value, float))


def _kind(dtype: Any) -> str:
    if isinstance(dtype, pl.List):
        return "a list of whole numbers"
    if dtype == pl.String:
        return "text"
    return "a number" if dtype == pl.Float64 else "a whole number"


def _shown(text: str) -> str:
    """The text, short and on one line."""
    return ascii(text if len(text) <= 40 else text[:37] + "...")
