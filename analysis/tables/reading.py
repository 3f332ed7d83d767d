# SPDX-License-Identifier: Apache-2.0
"""Read a table's files in parts of some megabytes, and only up to the last finished line.

Polars can scan a CSV file by itself, but not up to a given byte. While a table is being written it
would fail at the unfinished line, and see more rows in each pass.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import polars as pl

from analysis.errors import SessionError
from analysis.tables.faults import shown
from analysis.tables.pieces import Piece
from analysis.tables.schema import PRECISION_SEC, Table
from profilemate.format import cells
from profilemate.format.session import JOURNAL_FOLDER

_CHUNK = 16 << 20
_LINE = 1 << 16
_LARGEST_OPENING = 64 << 20
"""Bytes of an opening's text: it has a few rows for each request that runs."""

_NOT_A_TABLE = (
    "it is not a table of this format; restore the recorded file, or make it again with "
    f"'profilemate finalize' if {JOURNAL_FOLDER}/ is still there"
)

_CLIENT_TEXT = ("request_id", "lora")

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Extent:
    """The bytes of a file's text that are read: rows from ``begin`` to ``end``. ``width``: how many
    columns a CSV's header names."""

    piece: Piece
    begin: int
    end: int
    width: int

    @property
    def is_empty(self) -> bool:
        return self.begin == self.end


def extent(piece: Piece, table: Table, *, whole: bool) -> Extent:
    """Where the table's rows are; an empty extent without a file or without a row.

    Args:
        piece: the file.
        table: what should be in it.
        whole: the file is complete, so that the last line counts even without its line end.

    Raises:
        SessionError: the file cannot be read, or the header is not the table's.

    """
    if not piece.is_there():
        return Extent(piece, 0, 0, 0)
    if piece.rows is not None:
        piece.rows.check()
        return Extent(piece, 0, piece.rows.text_bytes if piece.rows.rows else 0, 0)
    with piece.text() as file:
        if piece.packed is not None:
            end = piece.packed.plain_bytes
        elif piece.kept is not None:
            end = piece.kept.size if whole else piece.kept.lines_end
        else:
            end = os.fstat(file.fileno()).st_size if whole else _last_line_end(file, table)
        header = file.readline(_LINE) if table.is_csv else b""
    if table.is_csv and not header.endswith(b"\n") and len(header) == _LINE:
        piece.check()
        raise SessionError(f"{piece.path}, line 1: {_NOT_A_TABLE}")
    if len(header) > end or not end:
        return Extent(piece, 0, 0, 0)
    return Extent(piece, len(header), end, _width(header, piece, table) if table.is_csv else 0)


def frames(parts: Sequence[Extent], table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    """These columns of the rows, in the files' order, in frames of some megabytes.

    Their types are those of ``analysis.tables.schema``. An opening comes first, in one frame, and
    its rows are in the order of time.

    Raises:
        PolarsError: a line is malformed, or too long.
        SessionError: a file cannot be read, or is damaged.

    """
    own = []
    for part in parts:
        if part.piece.rows is not None:
            # It is the only one, but for an opening before it.
            for rows in part.piece.rows.frames(columns):
                yield rows if table.is_csv else _as_in_csv_tables(rows)
        elif part.piece.before_sec is None:
            own.append(part)
        elif not part.is_empty:
            yield _opening(part, part.piece.before_sec, table, columns)
    texts = _texts(own, table)
    if not all(part.piece.is_plain for part in own):
        # Unpacking takes a third of the time that it takes to make a frame.
        texts = ahead(texts)
    for part, lines in texts:
        _refuse_long(lines, table.longest_line)
        frame = _frame(lines, table, part, columns)
        if frame is not None:
            yield frame


def text_of(parts: Sequence[Extent]) -> Iterator[bytes]:
    """The text of plain files, one after the other, with the header of the first one only.

    Raises:
        SessionError: a file cannot be read.

    """
    for number, part in enumerate(parts):
        with part.piece.text() as file:
            header = file.read(part.begin)
            left = part.end - part.begin
            if number == 0:
                yield header
            while left:
                text = file.read(min(left, _CHUNK))
                if not text:
                    break
                left -= len(text)
                yield text


def ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """The same items; a thread makes each while the caller works on the one before."""
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, items, None)
            yield item


def _texts(parts: Sequence[Extent], table: Table) -> Iterator[tuple[Extent, bytes]]:
    """The lines of the files, in parts, each with a file that has as many columns. A line that is
    too long ends one."""
    filled = (part for part in parts if not part.is_empty)
    for (is_packed, _), alike in groupby(
        filled, lambda part: (not part.piece.is_plain, part.width)
    ):
        if is_packed:
            # A small table has a few lines in each segment: these make one frame together.
            files = list(alike)
            for lines in _lines(_unpacked(files), _CHUNK, table.longest_line):
                yield files[0], lines
            continue
        for part in alike:
            with part.piece.text() as file:
                for begin, end in _extents(file, part, table.longest_line):
                    file.seek(begin)
                    yield part, file.read(end - begin)


def _unpacked(parts: Iterable[Extent]) -> Iterator[bytes]:
    """The rows of packed files, one after the other. Each file ends with a line's end."""
    for part in parts:
        header, left, text = part.begin, part.end, b""
        for unpacked in part.piece.unpacked():
            text = unpacked[:left] or text
            yield unpacked[header:left]
            header, left = max(0, header - len(unpacked)), max(0, left - len(unpacked))
        if not text.endswith(b"\n"):
            yield b"\n"


def _lines(texts: Iterable[bytes], size: int, longest: int) -> Iterator[bytes]:
    """The same text in parts of ``size`` bytes and the rest of a line.

    A line of more than ``longest`` bytes may end one.
    """
    parts: list[bytes] = []
    together = 0
    for text in texts:
        parts.append(text)
        together += len(text)
        end = text.rfind(b"\n") + 1 if together >= size else 0
        if end or together > size + longest:
            end = end or len(text)
            parts[-1] = text[:end]
            yield b"".join(parts)
            parts, together = [text[end:]], len(text) - end
    if together:
        yield b"".join(parts)


def _opening(part: Extent, before_sec: float, table: Table, columns: Sequence[str]) -> pl.DataFrame:
    """The rows of an opening, in the order of time, and before what it opens."""
    if part.end > _LARGEST_OPENING:
        raise SessionError(
            f"{part.piece.path}: larger than {_LARGEST_OPENING >> 20} MiB; restore the recorded "
            "file"
        )
    names = list(dict.fromkeys([*columns, table.time]))
    rows = [pl.DataFrame(schema={name: table.columns[name] for name in names})]
    for _, lines in _texts([part], table):
        _refuse_long(lines, table.longest_line)
        frame = _frame(lines, table, part, names)
        if frame is not None:
            rows.append(frame)
    found = pl.concat(rows)
    if (found[table.time] * table.time_unit > before_sec + PRECISION_SEC).any():
        raise pl.exceptions.ComputeError("a row is later than the beginning that it explains")
    # One that has the very time of the beginning is still of what came before.
    latest = math.nextafter(before_sec / table.time_unit, 0)
    return (
        found.with_columns(pl.col(table.time).clip(upper_bound=latest))
        .sort(table.time, maintain_order=True)
        .select(columns)
    )


def _frame(lines: bytes, table: Table, part: Extent, columns: Sequence[str]) -> pl.DataFrame | None:
    """These columns of some lines; None where the lines are empty."""
    if not lines or lines.isspace():
        return None
    if table.is_csv:
        rows = pl.scan_csv(lines, has_header=False, schema=csv_schema(table, part))
        return rows.select(of_csv(table, part, columns)).collect()
    frame = pl.read_ndjson(lines, schema={column: table.columns[column] for column in columns})
    return _as_in_csv_tables(frame)


def _as_in_csv_tables(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(_as_in_csv(frame[name]) for name in _CLIENT_TEXT if name in frame)


def _as_in_csv(text: pl.Series) -> pl.Series:
    """Text that a client controls, escaped as in the CSV tables, so that names compare."""
    # Hardly any text needs it, and one class of characters is found far faster than many texts.
    if text.str.contains(cells.ANY_HIDDEN).any():
        text = text.str.replace_many(list(cells.HIDDEN), list(cells.ESCAPED))
    is_formula = text.str.contains(cells.FORMULA)
    if is_formula.any():
        text = text.set(is_formula, None).fill_null("'" + text)
    return text


def csv_schema(table: Table, part: Extent) -> dict[str, type[pl.DataType] | pl.DataType]:
    """The types of the file's columns, those included that a newer version has appended. An older
    one has fewer."""
    appended = range(len(table.columns), part.width)
    known = dict(list(table.columns.items())[: part.width])
    return {**known, **{f"appended_{number}": pl.String for number in appended}}


def of_csv(table: Table, part: Extent, columns: Sequence[str]) -> list[pl.Expr]:
    """These columns of a CSV file, null where an older version did not have them."""
    there = csv_schema(table, part)
    return [
        pl.col(name)
        if name in there
        else pl.repeat(None, pl.len(), dtype=table.columns[name]).alias(name)
        for name in columns
    ]


def last_line(piece: Piece, table: Table) -> bytes:
    """The last finished line of a file that is plain or kept as text; empty without one.

    Raises:
        SessionError: the file cannot be read.

    """
    if piece.kept is not None:
        tail = b""
        for text in piece.unpacked():
            tail = (tail + text)[-2 * _LINE :]
        return tail[: tail.rfind(b"\n") + 1].rstrip(b"\n").rpartition(b"\n")[2]
    with piece.text() as file:
        end = _last_line_end(file, table)
        file.seek(max(0, end - _LINE))
        return file.read(min(end, _LINE)).rstrip(b"\n").rpartition(b"\n")[2]


def _last_line_end(file: io.BufferedReader, table: Table) -> int:
    """The byte after the last line end. It rewinds the file to its beginning.

    Where an unfinished line is too long, it is the file's end: then reading the line says so.
    """
    size = position = os.fstat(file.fileno()).st_size
    while position:
        begin = max(0, position - _LINE)
        file.seek(begin)
        found = file.read(position - begin).rfind(b"\n")
        if found >= 0:
            position = begin + found + 1
            break
        position = begin if size - begin <= table.longest_line else size
        if position == size:
            break
    file.seek(0)
    return position


def _extents(file: io.BufferedReader, part: Extent, longest: int) -> Iterator[tuple[int, int]]:
    """Where parts of whole lines begin and end. A line of more than ``longest`` bytes ends one."""
    begin = part.begin
    while begin < part.end:
        file.seek(begin + _CHUNK)
        file.readline(longest)
        end = min(file.tell(), part.end)
        yield begin, end
        begin = end


def _refuse_long(lines: bytes, longest: int) -> None:
    """Raise a PolarsError where a line has more than ``longest`` bytes, its end included."""
    begin = 0
    while len(lines) - begin > longest:
        end = lines.rfind(b"\n", begin, begin + longest)
        if end < 0:
            raise pl.exceptions.ComputeError("a line is too long")
        begin = end + 1


def _width(header: bytes, piece: Piece, table: Table) -> int:
    line = header.decode(errors="replace").rstrip("\r\n")
    try:
        names = next(csv.reader([line]), [])
    except csv.Error:
        names = [line]
    for number, column in enumerate(table.columns):
        if number >= len(names) and not {*table.required} - {*names}:
            break  # It is an older version's.
        if number >= len(names) or names[number] != column:
            # In a damaged file, the header is not what is wrong.
            piece.check()
            found = shown(names[number]) if number < len(names) else "nothing"
            raise SessionError(
                f"{piece.path}, line 1: {found} where column {number + 1} is {column!r}; "
                f"{_NOT_A_TABLE}"
            )
    return len(names)
