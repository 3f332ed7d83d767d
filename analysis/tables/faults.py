# SPDX-License-Identifier: Apache-2.0
"""Which line of a table is malformed, and why?

This runs only after reading the table has failed, so it may take its time.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl

from analysis.tables.pieces import Piece
from analysis.tables.rules import RULES
from analysis.tables.schema import PRECISION_SEC, Table

_TOGETHER = 4 << 20
"""Bytes of lines whose rules are checked at once: each line alone would take far longer."""
_INT64 = (-(2**63), 2**63 - 1)

_Last = dict[tuple[str, ...], dict[str, float]]
"""The time and the number of the last row of each kind, such as its engine."""


@dataclass(frozen=True)
class Fault:
    """``what`` is wrong in this ``line`` of the file at ``path``; of its text, if it is not
    plain."""

    path: Path
    is_plain: bool
    line: int
    what: str


def first_fault(files: Iterable[tuple[Piece, int]], table: Table) -> Fault | None:
    """The first malformed line of a table's files; None where no line is malformed.

    Args:
        files: each file of the table, in order, and the byte of its text before which its rows end.
        table: what should be in them.

    Raises:
        SessionError: a file cannot be read, or is damaged as a whole.

    """
    last: _Last = {}
    # Its own limit is shorter than a line may be.
    csv.field_size_limit(table.longest_line)
    for piece, end in files:
        # In a damaged file, what lines have is not what is wrong.
        piece.check()
        with piece.text() as text:
            found = _first_in(text, table, end, piece.before_sec, last)
        if found is not None:
            return Fault(piece.path, piece.is_plain, *found)
    return None


def _first_in(
    file: BufferedReader, table: Table, end: int, before_sec: float | None, last: _Last
) -> tuple[int, str] | None:
    """The number of the first malformed line before byte ``end``, and what is wrong with it.

    ``last``: the last row of each kind in the files before this one, and then in this one.
    """
    width = position = waiting = 0
    lines: list[tuple[int, bytes]] = []
    for number in count(1):
        raw = file.readline(table.longest_line + 1)
        position += len(raw)
        if not raw or position > end:
            break
        if table.is_csv and number == 1:
            width = raw.count(b",") + 1
            continue
        fault = next(_faults(raw, table, width), None)
        if before_sec is not None:
            fault = fault or _lateness(raw, table, before_sec)
        else:
            fault = fault or _disorder(raw, table, last)
        if fault:
            return _broken(lines, table) or (number, fault)
        lines.append((number, raw))
        waiting += len(raw)
        if waiting > _TOGETHER:
            if (found := _broken(lines, table)) is not None:
                return found
            lines.clear()
            waiting = 0
    return _broken(lines, table)


def _faults(raw: bytes, table: Table, width: int) -> Iterator[str]:
    if len(raw) > table.longest_line:
        yield f"longer than {table.longest_line >> 20} MiB"
        return
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
    if not min(len(table.columns), width) <= len(fields) <= width:
        yield f"{len(fields)} fields instead of {width}"
    for (column, dtype), field in zip(table.columns.items(), fields, strict=False):
        if not field:
            if column in table.required:
                yield f"{column} is empty"
        elif (value := _read_as(field, dtype)) is None:
            yield f"{column} is {shown(field)}, not {_kind(dtype)}"
        elif not _makes_sense(value, column, table):
            yield f"{column} is {shown(field)}, {_out_of_range(column, table)}"


def _lateness(raw: bytes, table: Table, before_sec: float) -> str | None:
    """What to say of a sound row of an opening that is later than what it opens."""
    (time,) = _values(raw, table, [table.time])
    if time is None or time * table.time_unit <= before_sec + PRECISION_SEC:
        return None
    return f"{table.time} is {time:.6f}, but its segment begins at {before_sec:.6f} s"


def _disorder(raw: bytes, table: Table, last: _Last) -> str | None:
    """What to say of a sound row that is earlier than the ``last`` one of its kind, or whose number
    is not larger."""
    if not table.in_order:
        return None
    row = dict(zip(table.columns, next(csv.reader([raw.decode()])), strict=False))
    if any(row[name] not in values for name, values in table.in_order_where.items()):
        return None
    names = [name for name in (table.time, table.rising) if row.get(name)]
    now = {name: float(row[name]) for name in names}
    key = tuple(row[column] for column in table.in_order)
    before = last.get(key, {})
    last[key] = now
    alike = " and ".join(table.in_order)
    if now[table.time] < before.get(table.time, 0):
        return (
            f"{table.time} is {now[table.time]:.6f}, but an earlier row of the {alike} has "
            f"{before[table.time]:.6f}"
        )
    number = table.rising
    if number in now and number in before and now[number] <= before[number]:
        return (
            f"{number} is {now[number]:.0f}, but the row of the {alike} before it has "
            f"{before[number]:.0f}"
        )
    return None


def _broken(lines: Sequence[tuple[int, bytes]], table: Table) -> tuple[int, str] | None:
    """The number of the first of these sound lines that breaks a rule, and what to say of it."""
    rules = RULES[table.name]
    names = list(dict.fromkeys(name for rule in rules for name in rule.columns))
    if not names or not lines:
        return None
    rows = pl.DataFrame(
        [_values(raw, table, names) for _, raw in lines],
        schema={name: table.columns[name] for name in names},
        orient="row",
    )
    found: list[tuple[int, str]] = []
    for rule in rules:
        broken = rows.with_row_index("line").filter(~rule.holds).head(1)
        for row in broken.iter_rows(named=True):
            values = (f"{name} is {shown(str(row[name]))}" for name in rule.columns)
            found.append((lines[row["line"]][0], f"{rule.broken}: {', '.join(values)}"))
    return min(found, key=lambda one: one[0], default=None)


def _values(raw: bytes, table: Table, names: Sequence[str]) -> list[Any]:
    """The values of a sound line in these columns."""
    text = raw.decode().rstrip("\r\n")
    if not table.is_csv:
        row = json.loads(text) if text.strip() else {}
        return [row.get(name) for name in names]
    fields = dict(zip(table.columns, next(csv.reader([text]), []), strict=False))
    cells = [(fields.get(name), table.columns[name]) for name in names]
    return [_read_as(cell, kind) if cell else None for cell, kind in cells]


def _read_as(field: str, dtype: Any) -> Any:
    """The field's value; None where it has none of this type."""
    try:
        if dtype == pl.Int64:
            return int(field)
        value = float(field) if dtype == pl.Float64 else field
    except ValueError:
        return None
    return None if value != value else value  # Only NaN is not itself.


def _makes_sense(value: Any, column: str, table: Table) -> bool:
    """Whether a value is within the bounds of its column; text always is."""
    lowest, highest = table.bounds.get(column, _INT64)
    return not isinstance(value, (int, float)) or lowest <= value <= highest


def _out_of_range(column: str, table: Table) -> str:
    lowest, highest = table.bounds.get(column, _INT64)
    return f"which is out of range: it is at least {lowest:,} and at most {highest:,}"


def _json_faults(line: str, table: Table) -> Iterator[str]:
    if not line.strip():
        return
    try:
        row = json.loads(line, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
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
            yield f"{column} is {shown(json.dumps(value))}, not {_kind(dtype)}"
        elif not all(_makes_sense(one, column, table) for one in _each(value)):
            yield f"{column} is {shown(json.dumps(value))}, {_out_of_range(column, table)}"


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is(value: Any, dtype: Any) -> bool:
    if isinstance(dtype, pl.List):
        return isinstance(value, list) and all(_is(item, dtype.inner) for item in value)
    if dtype == pl.String:
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (dtype == pl.Float64 and isinstance(value, float))


def no_number(constant: str) -> Any:
    """Refuse NaN and the infinities, which Python's reader takes though JSON has none."""
    raise ValueError(f"{constant} is no number")


def _kind(dtype: Any) -> str:
    if isinstance(dtype, pl.List):
        return "a list of whole numbers"
    if dtype == pl.String:
        return "text"
    return "a number" if dtype == pl.Float64 else "a whole number"


def shown(text: str) -> str:
    """The text in ASCII, abridged, on one line."""
    kept = text if len(text) <= 40 else text[:37] + "..."
    # Each character that is not ASCII takes up to ten.
    return ascii(kept) if len(ascii(kept)) <= 60 else ascii(text[:5] + "...")
