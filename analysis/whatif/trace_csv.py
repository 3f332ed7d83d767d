# SPDX-License-Identifier: Apache-2.0
"""Which requests does a trace have that is CSV: when they came, and how long they were?

BurstGPT's has seconds, and Azure's dates. Neither has contents, so what prompts share is not known.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from analysis.errors import SessionError
from analysis.tables.schema import MOST_TOKENS, TABLES

NOTE = (
    "its requests have lengths and times, and no contents: prefix caching is off, as what prompts "
    "share is not known"
)


@dataclass(frozen=True)
class _Kind:
    """The columns of a published trace, and the milliseconds of its time's unit; None for dates."""

    name: str
    time: str
    prompt: str
    answer: str
    unit: float | None


_KINDS = (
    _Kind("BurstGPT", "Timestamp", "Request tokens", "Response tokens", 1e3),
    _Kind("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", None),
)

_COLUMNS: Mapping[str, pl.DataType | type[pl.DataType]] = TABLES["requests"].columns


def is_csv(content: bytes) -> bool:
    """Whether a file is CSV rather than lines of JSON."""
    first = content.lstrip()[:4096].splitlines()[0]
    return not first.startswith((b"{", b"[", b'"{')) and b"," in first and b"{" not in first


def read(path: Path, content: bytes, unit: float | None) -> pl.DataFrame:
    """The requests of a CSV file, with the columns of ``analysis.whatif.trace``.

    Args:
        path: the file, for messages.
        content: its text.
        unit: the milliseconds of the unit of its times; that of its kind by default.

    Raises:
        SessionError: its header is of no kind that is known, or a line is malformed.

    """
    header = next(
        csv.reader([content.lstrip(b"\xef\xbb\xbf").splitlines()[0].decode("utf-8", "replace")])
    )
    kind = next((one for one in _KINDS if {one.time, one.prompt, one.answer} <= {*header}), None)
    if kind is None:
        wanted = " nor ".join(
            f"{one.name}'s columns {one.time}, {one.prompt} and {one.answer}" for one in _KINDS
        )
        raise SessionError(
            f"{path} is CSV whose header has neither {wanted}; name a file with one of these, or "
            "with a line of JSON for each request"
        )
    if kind.unit is None and unit is not None:
        raise SessionError(f"{path}: its times are dates and have no unit; leave out --time-unit")
    try:
        text = pl.read_csv(
            io.BytesIO(content), columns=[kind.time, kind.prompt, kind.answer], infer_schema=False
        )
    except pl.exceptions.PolarsError as error:
        said = str(error).partition("\n")[0]
        raise SessionError(f"{path} is malformed CSV: {said}") from None
    count = pl.col(kind.prompt, kind.answer).cast(pl.Int64, strict=False)
    rows = text.select(_times(kind, unit).alias("timestamp"), count).rename(
        {kind.prompt: "input_length", kind.answer: "output_length"}
    )
    _check(path, rows, kind)
    return rows.with_columns(
        pl.lit([], _COLUMNS["hash_ids"]).alias("hash_ids"),
        pl.lit(None, _COLUMNS["block_size"]).alias("block_size"),
        pl.lit(None, pl.Int64).alias("before"),
        pl.lit(None, pl.Float64).alias("delay"),
    )


def _times(kind: _Kind, unit: float | None) -> pl.Expr:
    """Milliseconds."""
    if kind.unit is not None:
        return pl.col(kind.time).cast(pl.Float64, strict=False) * (unit or kind.unit)
    # A date of the first release has no zone, and one of the second has UTC's.
    plain = pl.col(kind.time).str.replace(r"(\+00:00|Z)$", "")
    return plain.str.to_datetime(strict=False, time_unit="ns").dt.timestamp("us") / 1e3


def _check(path: Path, rows: pl.DataFrame, kind: _Kind) -> None:
    """Raise a SessionError that names the first odd line."""
    for name, column, least in (
        ("timestamp", kind.time, 0),
        ("input_length", kind.prompt, 1),
        ("output_length", kind.answer, 0),
    ):
        sound = pl.col(name) >= least
        if name != "timestamp":
            sound &= pl.col(name) <= MOST_TOKENS
        odd = rows.select((~sound).fill_null(True)).to_series()
        if odd.any():
            what = "a time" if name == "timestamp" else f"a number of tokens from {least} on"
            raise SessionError(
                f"{path}, line {int(odd.arg_max() or 0) + 2:,}: {column} is not {what}; repair or "
                "remove that line"
            )
    if not rows.height:
        raise SessionError(f"{path} has a header and no request")
