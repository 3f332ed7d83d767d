# SPDX-License-Identifier: Apache-2.0
"""Which pieces is each table of a Parquet session made of?

Segments are there as they were, without files of their own: their rows are in the tables' Parquet
files, and their openings and indexes are kept as text.
"""

from __future__ import annotations

import re
from pathlib import Path

from analysis.errors import SessionError
from analysis.tables import parquet_index, segment_index
from analysis.tables.parquet_index import ParquetIndex, SourceFile
from analysis.tables.pieces import Piece
from analysis.tables.schema import TABLES, Table
from analysis.tables.segments import Files, Segment
from profilemate.format.segments import CLOSING_PREFIX, INDEX_FILE, folder_name, opening_name
from profilemate.format.session import SEGMENTS_FOLDER

_OF_SEGMENT = re.compile(rf"{SEGMENTS_FOLDER}/(?:{re.escape(CLOSING_PREFIX)})?(\d+)/(.+)")


def find(directory: Path) -> Files:
    """The pieces of the tables of the Parquet session in this folder.

    Raises:
        SessionError: its index, or that of a segment, cannot be read or is damaged.

    """
    index = parquet_index.read(directory)
    numbers = [int(found[1]) for each in index.files if (found := _OF_SEGMENT.match(each.path))]
    plain = {table.name: _pieces(directory, index, table) for table in TABLES.values()}
    return Files(_segments(directory, index), min(numbers, default=None), plain)


def _pieces(directory: Path, index: ParquetIndex, table: Table) -> tuple[Piece, ...]:
    if (rows := index.tables.get(table.name)) is not None:
        return (Piece(rows.path, in_segment=True, rows=rows),)
    return tuple(
        _as_text(directory, each)
        for each in index.files
        if each.kept is not None and _is_of(each.path, table)
    )


def _is_of(path: str, table: Table) -> bool:
    """Whether a file of a session has rows of this table, openings not included."""
    stem, _, kind = table.file.rpartition(".")
    name = path.rpartition("/")[2]
    return name == table.file or bool(re.fullmatch(rf"{stem}\.\d+\.{kind}\.gz", name))


def _as_text(directory: Path, each: SourceFile, before_sec: float | None = None) -> Piece:
    return Piece(directory / each.path, in_segment=True, before_sec=before_sec, kept=each.kept)


def _segments(directory: Path, index: ParquetIndex) -> tuple[Segment, ...]:
    """The closed segments, with the openings of each. Their tables are not theirs alone."""
    files = {each.path: each for each in index.files}
    found = []
    for path, each in files.items():
        match = _OF_SEGMENT.fullmatch(path)
        if match is None or match[2] != INDEX_FILE or each.kept is None:
            continue
        number = int(match[1])
        folder = directory / SEGMENTS_FOLDER / folder_name(number)
        if each.size > segment_index.LONGEST:
            raise SessionError(f"{folder / INDEX_FILE}: it is too large; restore the recorded file")
        content = b"".join(each.kept.text())
        about = segment_index.parsed(content, folder / INDEX_FILE)
        openings = {}
        for table in TABLES.values():
            name = f"{SEGMENTS_FOLDER}/{folder_name(number)}/{opening_name(table.file)}"
            if name in files:
                openings[table.name] = _as_text(directory, files[name], about.begin_sec)
        found.append(Segment(number, folder, about, {}, openings))
    return tuple(sorted(found, key=_number))


def _number(segment: Segment) -> int:
    return segment.number
