# SPDX-License-Identifier: Apache-2.0
"""Which requests does a trace have that is a line of JSON for each?

Each line is an object with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, and
may have ``block_size``. In place of ``timestamp`` a turn of a conversation may have ``delay``, the
time after the answer of the turn before it: the last line before with the same ``session_id``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from analysis.errors import SessionError
from analysis.tables.schema import MOST_TOKENS, TABLES

_TABLE = TABLES["requests"]
_LENGTHS = ("input_length", "output_length")
_NO_TEXT = "it is no text"
_REQUIRED = ("timestamp", *_LENGTHS, "hash_ids")
"""What every line must have; a turn of a conversation may have ``delay`` in place of the first."""

_SCHEMA = {
    **{name: _TABLE.columns[name] for name in (*_REQUIRED, "block_size")},
    "delay": pl.Float64,
    "before": pl.Int64,
}


@dataclass(frozen=True)
class Lines:
    """``rows``: a row for each line, numbered by ``row``, with times in the file's unit.
    ``in_seconds``: the lines are of a kind whose times are seconds. ``is_of_a_session``: they are
    profilemate's own, whose times are milliseconds with fractions."""

    rows: pl.DataFrame
    in_seconds: bool
    is_of_a_session: bool


def read(path: Path, content: bytes) -> Lines:
    """The lines of a trace.

    Raises:
        SessionError: a line is malformed.

    """
    rows = _at_once(content)
    if rows is None:
        rows = _one_by_one(path, content)
    first = _object(content.split(maxsplit=0)[0].splitlines()[0]) or {}
    return Lines(
        rows.with_row_index("row"),
        in_seconds="parent_chat_id" in first,
        is_of_a_session="request_id" in first,
    )


def _at_once(content: bytes) -> pl.DataFrame | None:
    """All lines, where they are as in most traces; None where each needs a closer look."""
    if b'"delay"' in content:
        return None
    schema = {name: kind for name, kind in _SCHEMA.items() if name not in ("delay", "before")}
    try:
        rows = pl.read_ndjson(io.BytesIO(content), schema=schema)
    except pl.exceptions.PolarsError:
        return None
    sound = pl.all_horizontal(
        *(pl.col(name).is_not_null() for name in _REQUIRED),
        pl.col("timestamp", *_LENGTHS) >= 0,
        pl.col(*_LENGTHS) <= MOST_TOKENS,
        pl.col("input_length") > 0,
        pl.col("block_size").fill_null(1) > 0,
        pl.col("hash_ids").list.min().fill_null(0) >= 0,
    )
    if not rows.select(sound.fill_null(False).all()).item():
        return None
    return rows.with_columns(
        pl.lit(None, _SCHEMA[name]).alias(name) for name in ("delay", "before")
    )


def _one_by_one(path: Path, content: bytes) -> pl.DataFrame:
    """The lines, each looked at by itself; ids become numbers of their own, as they may be large.

    Raises:
        SessionError: a line is malformed.

    """
    numbers: dict[int, int] = {}
    turns: dict[str, int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA}
    for row, (number, line) in enumerate(_numbered(content)):
        fault, found = _line_fault(line), _object(line)
        if fault or found is None:
            advice = "repair or remove that line"
            if fault == _NO_TEXT:
                advice = "name a file with a line of JSON for each request"
            elif number == 1 and fault and fault.endswith("is missing"):
                advice = f"every line of a trace has {', '.join(_REQUIRED[:-1])} and hash_ids"
            raise SessionError(f"{path}, line {number:,}: {fault}; {advice}")
        name = json.dumps(found.get("session_id"))
        waits = found.get("timestamp") is None
        for column in (*_REQUIRED, "block_size"):
            columns[column].append(found.get(column))
        columns["hash_ids"][-1] = [
            numbers.setdefault(each, len(numbers)) for each in found["hash_ids"]
        ]
        columns["before"].append(turns.get(name) if waits else None)
        columns["delay"].append(found.get("delay") if waits else None)
        if waits and name not in turns:
            # The first turn of a conversation has none to wait for.
            columns["timestamp"][-1] = found["delay"]
        turns[name] = row
    return pl.DataFrame(columns, schema=_SCHEMA, strict=False)


def _numbered(content: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield number, line


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, Mapping) else None


def _line_fault(line: bytes) -> str | None:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return _NO_TEXT
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(row, Mapping):
        return "it is not an object"
    times = "delay" if row.get("timestamp") is None and "delay" in row else "timestamp"
    for name in (times, *_LENGTHS):
        value = row.get(name)
        if value is None:
            return f"{name} is missing"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            return f"{name} is not a number from 0 on"
        if name in _LENGTHS and (value > MOST_TOKENS or value != int(value)):
            return f"{name} is no number of tokens, or over {MOST_TOKENS:,}"
    if not row["input_length"]:
        return "input_length is 0: a request has a prompt"
    return _ids_fault(row)


def _ids_fault(row: Mapping[str, Any]) -> str | None:
    size = row.get("block_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        return "block_size is not a number from 1 on"
    ids = row.get("hash_ids")
    if ids is None:
        return "hash_ids is missing"
    if not isinstance(ids, list) or any(type(number) is not int for number in ids):
        return "hash_ids is not a list of whole numbers"
    return None
