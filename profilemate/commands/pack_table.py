# SPDX-License-Identifier: Apache-2.0
"""Write a table as a Parquet file from which its text comes back byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source

from analysis.tables import canonical, stored
from analysis.tables.parquet_table import KEY, MOST_ROWS_OF_A_GROUP, described
from analysis.tables.pieces import Piece
from analysis.tables.schema import Table
from profilemate.format.parquet import table_file

_CHUNK = 8 << 20
"""Bytes of text that are read, and compared, at once."""
_GROUP_BYTES = 16 << 20
"""Of text, that the rows of a row group have, more or less."""
_LEVEL = 3
"""Of zstd: 9 takes twice as long and saves a fiftieth."""

Progress = Callable[[int], None]


class OtherwiseWrittenError(Exception):
    """The table's text does not come out of its rows as it was: it is damaged, or a hand or another
    release wrote it."""


@dataclass(frozen=True)
class Source:
    """A file of the session: ``path`` in its folder, and what reads its text."""

    path: str
    piece: Piece


@dataclass(frozen=True)
class _Shape:
    """How the rows are stored: what ``ParquetTable`` has under the same names."""

    columns: tuple[str, ...]
    decimals: Mapping[str, int]
    appended: tuple[str, ...]
    keys: tuple[str, ...]
    group_rows: int


@dataclass
class _Counted:
    """What the index says of a file, as its text goes by."""

    path: str
    rows: int
    size: int
    digest: Any

    def add(self, text: bytes, rows: int) -> None:
        self.rows += rows
        self.size += len(text)
        self.digest.update(text)

    def entry(self, table: str) -> dict[str, Any]:
        return {
            "path": self.path,
            "table": table,
            "rows": self.rows,
            "bytes": self.size,
            "sha256": self.digest.hexdigest(),
        }


@dataclass(frozen=True)
class PackedTable:
    """The entries of the index: of the ``table``, and of the ``files`` that it was."""

    table: dict[str, Any]
    files: list[dict[str, Any]]


def pack_table(
    folder: Path, table: Table, sources: Sequence[Source], progress: Progress
) -> PackedTable:
    """Write the table into the folder; every row is compared with its text.

    Args:
        folder: where the file goes.
        table: the table.
        sources: its files, in the order of their rows.
        progress: told how many bytes of text have been done, each time.

    Raises:
        OtherwiseWrittenError: the text would not come back; there is no file then.
        SessionError: a file cannot be read, or is damaged.
        OSError: the file cannot be written.

    """
    path = folder / table_file(table.name)
    header, shape = _shape_of(table, sources)
    counted: list[_Counted] = []
    kinds = stored.kinds(table, shape.columns, shape.decimals, shape.appended)

    def read(*_: Any) -> Iterator[pl.DataFrame]:
        for source in sources:
            counts = _Counted(source.path, 0, 0, hashlib.sha256())
            counted.append(counts)
            for number, text in enumerate(_chunks(source.piece, table)):
                if number == 0 and table.is_csv:
                    if text != header:
                        raise OtherwiseWrittenError
                    counts.add(text, 0)
                    continue
                rows = _rows_of(text, table, shape)
                counts.add(text, rows.height)
                yield rows.select(*kinds)
                progress(len(text))

    about = json.dumps(described(table, [*kinds], shape.decimals))
    try:
        register_io_source(read, schema=kinds).sink_parquet(
            path,
            compression="zstd",
            compression_level=_LEVEL,
            row_group_size=shape.group_rows,
            metadata={KEY: about},
        )
    except OtherwiseWrittenError:
        path.unlink(missing_ok=True)
        raise
    os.chmod(path, 0o600)
    size, digest = _measured(path)
    return PackedTable(
        {
            "rows": sum(each.rows for each in counted),
            "group_rows": shape.group_rows,
            "bytes": size,
            "sha256": digest,
            "columns": shape.columns,
            "decimals": shape.decimals,
            "appended": shape.appended,
            "keys": shape.keys,
        },
        [each.entry(table.name) for each in counted],
    )


def _chunks(piece: Piece, table: Table) -> Iterator[bytes]:
    """The text: of a CSV its header first, then parts of whole lines. A line without its end is a
    part of its own, or ends one."""
    with piece.text() as file:
        if table.is_csv:
            yield file.readline(table.longest_line)
        while text := file.read(_CHUNK):
            yield text + file.readline(table.longest_line) if text[-1:] != b"\n" else text


def _shape_of(table: Table, sources: Sequence[Source]) -> tuple[bytes, _Shape]:
    """The header, and how the rows are stored, from the first rows."""
    header, first = b"", b""
    for source in sources:
        chunks = _chunks(source.piece, table)
        if table.is_csv:
            header = next(chunks, b"")
        first = next(chunks, b"")
        if first:
            break
    columns, appended = tuple(table.columns), tuple[str, ...]()
    keys: tuple[str, ...] = ()
    if table.is_csv:
        names = header.decode(errors="replace").rstrip("\n").split(",")
        # An older release has fewer columns, a newer one has more.
        columns = tuple(table.columns)[: len(names)]
        appended = tuple(names[len(columns) :])
        if (
            names != [*columns, *appended]
            or not {*table.required} <= {*columns}
            or not all(map(str.isidentifier, appended))
        ):
            raise OtherwiseWrittenError
    elif first:
        keys = canonical.keys_of(first.partition(b"\n")[0])
        if not keys or not {*keys} <= {*table.columns}:
            raise OtherwiseWrittenError
    mean = len(first) // max(1, first.count(b"\n")) or 1
    group_rows = max(1024, min(MOST_ROWS_OF_A_GROUP, _GROUP_BYTES // mean))
    decimals = _decimals(first, table, columns, appended)
    return header, _Shape(columns, decimals, appended, keys, group_rows)


def _decimals(
    first: bytes, table: Table, columns: Sequence[str], appended: Sequence[str]
) -> dict[str, int]:
    """Digits behind the point by column, from the first rows."""
    floats = [name for name in columns if table.columns[name] == pl.Float64]
    if not first:
        return dict.fromkeys(floats, 6)
    with _otherwise():
        if not table.is_csv:
            numbers = pl.read_ndjson(first, schema=dict.fromkeys(floats, pl.Float64))
            return {name: 6 for name in floats if stored.is_exact(numbers[name], 6)}
        kinds = dict.fromkeys([*columns, *appended], pl.String)
        texts = pl.scan_csv(first, has_header=False, schema=kinds).select(floats).collect()
        found = {name: stored.decimals_of(texts[name]) for name in floats}
    return {name: digits for name, digits in found.items() if digits is not None}


def _rows_of(text: bytes, table: Table, shape: _Shape) -> pl.DataFrame:
    """The rows as they are stored, if their text comes back."""
    with _otherwise():
        if table.is_csv:
            kinds = {
                **{name: table.columns[name] for name in shape.columns},
                **dict.fromkeys(shape.appended, pl.String),
            }
            read = pl.scan_csv(text, has_header=False, schema=kinds).collect()
        else:
            read = pl.read_ndjson(text, schema=dict(table.columns))
        rows = stored.as_decimals(read, shape.decimals)
        if _text_of(rows, table, shape) != text:
            raise OtherwiseWrittenError
        if not stored.places_apply(table):
            return rows
        placed = stored.with_places(rows)
        if not stored.with_ids(placed).equals(rows):
            raise OtherwiseWrittenError
        return placed


@contextmanager
def _otherwise() -> Iterator[None]:
    """Turn Polars' error about a text into OtherwiseWrittenError."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        raise OtherwiseWrittenError from None


def _text_of(rows: pl.DataFrame, table: Table, shape: _Shape) -> bytes:
    return canonical.csv_rows(rows) if table.is_csv else canonical.json_rows(rows, shape.keys)


def _measured(path: Path) -> tuple[int, str]:
    """The file's size and its SHA-256."""
    known, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            known.update(part)
            size += len(part)
    return size, known.hexdigest()
