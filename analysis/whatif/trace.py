# SPDX-License-Identifier: Apache-2.0
"""Which requests does a trace in the Mooncake format have?

It has one JSON object a line with ``timestamp``, ``input_length``, ``output_length`` and
``hash_ids``, and ``block_size`` if an id does not stand for 512 tokens.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from analysis.errors import SessionError
from analysis.tables.schema import MOST_TOKENS, TABLES

BLOCK_TOKENS = 512
"""Tokens that an id stands for where the trace does not say it."""

_MOST_BYTES = 1 << 29
"""A small packed file may unpack to more than fits into memory."""

_TABLE = TABLES["requests"]
_REQUIRED = ("timestamp", "input_length", "output_length", "hash_ids")
"""What every line must have."""


def read(path: Path) -> pl.DataFrame:
    """The requests of a trace, gzipped or not, in the order of its lines.

    Columns: ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens),
    ``hash_ids`` (of the prompt's blocks), ``block_size`` (tokens that an id stands for).

    Raises:
        SessionError: the file cannot be read, is empty, or a line of it is malformed.

    """
    schema = {name: _TABLE.columns[name] for name in (*_REQUIRED, "block_size")}
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise SessionError(
                    f"{path} unpacks to more than {_MOST_BYTES:,} bytes; unpack it, and name a part"
                )
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise SessionError(f"cannot read {path}: {said}") from None
    if not content.strip():
        raise SessionError(f"{path} is empty; name a trace with one request a line")
    try:
        rows = pl.read_ndjson(io.BytesIO(content), schema=schema)
    except pl.exceptions.PolarsError as error:
        raise SessionError(_fault(path, content) or f"{path} is malformed: {error}") from None
    size = pl.col("block_size").fill_null(BLOCK_TOKENS)
    sound = pl.all_horizontal(
        *(pl.col(name).is_not_null() for name in _REQUIRED),
        pl.col("timestamp", "input_length", "output_length") >= 0,
        pl.col("input_length", "output_length") <= MOST_TOKENS,
        pl.col("input_length") > 0,
        size > 0,
        pl.col("hash_ids").list.len() >= pl.col("input_length") // size,
    )
    if not rows.select(sound.fill_null(False).all()).item():
        raise SessionError(_fault(path, content) or f"{path} is malformed")
    return rows.with_columns(size)


def _fault(path: Path, content: bytes) -> str | None:
    """What to say of the first malformed line; None where there is none."""
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip() and (what := _line_fault(line)):
            return f"{path}, line {number}: {what}; repair or remove that line"
    return None


def _line_fault(line: bytes) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(row, Mapping):
        return "it is not an object"
    for name in _REQUIRED[:3]:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            return f"{name} is missing or not a number from 0 on"
        if name != "timestamp" and (value > MOST_TOKENS or value != int(value)):
            return f"{name} is no number of tokens, or over {MOST_TOKENS:,}"
    if not row["input_length"]:
        return "input_length is 0: a request has a prompt"
    return _ids_fault(row)


def _ids_fault(row: Mapping[str, Any]) -> str | None:
    size = row.get("block_size", BLOCK_TOKENS)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return "block_size is not a number from 1 on"
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or any(type(number) is not int for number in ids):
        return "hash_ids is not a list of whole numbers"
    if any(not -(2**63) <= number < 2**63 for number in ids):
        return "hash_ids has numbers of more than 64 bits"
    full = int(row["input_length"]) // size
    if len(ids) < full:
        return f"hash_ids has {len(ids):,} ids where the prompt has {full:,} blocks of {size:,}"
    return None
