# SPDX-License-Identifier: Apache-2.0
"""Which requests does a trace have, as traces are published?

Either it has a line of JSON for each request (``trace_lines``), with the contents of the prompts,
or it is CSV (``trace_csv``), with lengths and times alone. Both may be gzipped.
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

from analysis.errors import SessionError
from analysis.whatif import trace_csv, trace_lines, trace_tokens

TimeUnit = Literal["s", "ms", "us", "ns"]

TIME_UNITS: dict[TimeUnit, float] = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
"""Milliseconds of each unit."""

_MOST_BYTES = 1 << 29
"""A small packed file may unpack to more than fits into memory."""


@dataclass(frozen=True)
class Trace:
    """The requests of a trace.

    ``rows``: in the order of its lines, with the columns ``timestamp`` (milliseconds, null for a
    turn that waits for the one before), ``input_length`` and ``output_length`` (tokens),
    ``hash_ids`` (of the prompt's blocks), ``block_size`` (tokens that an id stands for), ``before``
    (the number of the row that it waits for; null for none) and ``delay`` (milliseconds from that
    one's end). ``has_contents``: it has ids. ``notes``: how it was read, where that is no matter of
    course, a sentence each.
    """

    rows: pl.DataFrame
    has_contents: bool
    notes: tuple[str, ...]


def read(
    path: Path, *, tokens_per_id: int | None = None, time_unit: TimeUnit | None = None
) -> Trace:
    """The requests of a trace.

    Args:
        path: the file, gzipped or not.
        tokens_per_id: tokens that an id stands for; what the file says or proves by default.
        time_unit: the unit of its times; what the file says by default.

    Raises:
        SessionError: the file cannot be read, is empty, a line of it is malformed, or it
            contradicts itself or an argument.

    """
    content = _content(path)
    if trace_csv.is_csv(content):
        if tokens_per_id is not None:
            raise SessionError(f"{path} is CSV and has no ids; leave out --tokens-per-id")
        rows = trace_csv.read(path, content, time_unit and TIME_UNITS[time_unit])
        return Trace(rows, False, (trace_csv.NOTE,))
    lines = trace_lines.read(path, content)
    sizes, of_tokens = trace_tokens.sizes(path, content, lines.rows, tokens_per_id)
    unit, of_time = _unit(lines, time_unit)
    rows = lines.rows.with_columns(pl.col("timestamp", "delay") * unit, block_size=sizes)
    return Trace(rows, True, (*of_tokens, *of_time))


def _content(path: Path) -> bytes:
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
    return content


def _unit(lines: trace_lines.Lines, given: TimeUnit | None) -> tuple[float, tuple[str, ...]]:
    """The milliseconds of a time's unit, and a note where nobody said it."""
    if given is not None:
        return TIME_UNITS[given], ()
    if lines.in_seconds:
        return TIME_UNITS["s"], ("times are read as seconds, as its lines have a parent_chat_id",)
    times = lines.rows["timestamp"]
    if not lines.is_of_a_session and bool((times != times.floor()).any()):
        return TIME_UNITS["ms"], (
            "times are read as milliseconds; where they are seconds, say --time-unit s",
        )
    return TIME_UNITS["ms"], ()
