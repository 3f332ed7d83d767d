# SPDX-License-Identifier: Apache-2.0
"""What does the index of a Parquet session say, ``parquet.json``?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import SessionError, unreadable
from analysis.tables import index_file
from analysis.tables.faults import shown
from analysis.tables.files import opened
from analysis.tables.kept_text import KeptText
from analysis.tables.metadata import listed, whole
from analysis.tables.parquet_table import MOST_ROWS_OF_A_GROUP, PARQUET_VERSION, ParquetTable
from analysis.tables.schema import TABLES, Table
from analysis.tables.stored import MOST_DECIMALS
from profilemate.format.parquet import INDEX_FILE, TEXTS_FILE, table_file

_LONGEST = 64 << 20
"""More bytes are damage: it has some entries for each segment."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PATH = re.compile(r"(segments/(\.closing-)?\d{4,9}/)?[A-Za-z_][A-Za-z0-9_.]{0,99}")


@dataclass(frozen=True)
class SourceFile:
    """A file of the session that was packed.

    ``path``: where it was in the session's folder. ``size`` and ``sha256``: of its text. ``table``
    and ``rows``: whose rows it has, and how many; None where its text is ``kept``.
    """

    path: str
    size: int
    sha256: str
    table: str | None
    rows: int
    kept: KeptText | None


@dataclass(frozen=True)
class ParquetIndex:
    """``session``: the name of the session that was packed. ``tables``: by name, those with rows in
    a Parquet file. ``files``: those that the session had, in the order of their rows."""

    session: str
    tables: Mapping[str, ParquetTable]
    files: tuple[SourceFile, ...]


def is_there(directory: Path) -> bool:
    """Whether the folder is a Parquet session's."""
    return (directory / INDEX_FILE).is_file()


def read(directory: Path) -> ParquetIndex:
    """The index of the Parquet session in this folder.

    Raises:
        SessionError: it cannot be read, is damaged, or is of another version.

    """
    path = directory / INDEX_FILE
    try:
        with opened(path) as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    index = index_file.parsed(
        content,
        longest=_LONGEST,
        key="parquet_version",
        version=PARQUET_VERSION,
        refused=lambda what: _refused(path, what),
    )
    try:
        files = tuple(_file(entry, directory) for entry in listed(index.get("files")))
        _refuse_twice([each.path for each in files])
        tables = {
            name: _table(TABLES[name], entry, files, directory)
            for name, entry in index["tables"].items()
        }
        _refuse_missing(files, tables)
        session = index["session"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = str(error) if type(error) is ValueError else "an entry is missing or of another kind"
        raise _refused(path, what) from None
    return ParquetIndex(str(session), tables, files)


def _file(entry: Mapping[str, Any], directory: Path) -> SourceFile:
    path, table = entry["path"], entry.get("table")
    if not isinstance(path, str) or _PATH.fullmatch(path) is None or ".." in path:
        raise ValueError(f"{shown(str(path))} is no file of a session")
    size, sha256 = _count(entry, "bytes"), _digest(entry)
    if table is not None:
        return SourceFile(path, size, sha256, TABLES[table].name, _count(entry, "rows"), None)
    kept = KeptText(
        directory / TEXTS_FILE,
        path,
        _count(entry, "first"),
        _count(entry, "parts"),
        size,
        sha256,
        _count(entry, "lines_end"),
    )
    return SourceFile(path, size, sha256, None, 0, kept)


def _table(
    table: Table, entry: Mapping[str, Any], files: tuple[SourceFile, ...], directory: Path
) -> ParquetTable:
    own = [each for each in files if each.table == table.name]
    rows, group_rows = _count(entry, "rows"), _count(entry, "group_rows")
    if rows != sum(each.rows for each in own):
        raise ValueError(f"{table.name} has {rows:,} rows, and its files have others")
    if not 1 <= group_rows <= MOST_ROWS_OF_A_GROUP:
        raise ValueError(f"group_rows of {table.name} is {group_rows:,}")
    decimals = dict(entry["decimals"])
    for name, digits in decimals.items():
        if name not in entry["columns"] or whole(digits) is None or digits > MOST_DECIMALS:
            raise ValueError(f"{shown(str(name))} of {table.name} has no such decimals")
    columns, appended = _names(entry["columns"]), _names(entry["appended"])
    keys = _names(entry["keys"])
    if (
        not {*table.required, *keys} <= {*columns} <= {*table.columns}
        or {*appended} & {*table.columns}
        or len({*columns, *appended}) != len(columns) + len(appended)
    ):
        raise ValueError(f"{table.name} has other columns")
    return ParquetTable(
        directory / table_file(table.name),
        table,
        rows,
        _count(entry, "bytes"),
        _digest(entry),
        group_rows,
        columns,
        decimals,
        appended,
        keys,
        sum(each.size for each in own),
    )


def _refuse_twice(paths: list[str]) -> None:
    if len({*paths}) != len(paths):
        raise ValueError("a file is there twice")


def _refuse_missing(files: tuple[SourceFile, ...], tables: Mapping[str, ParquetTable]) -> None:
    for each in files:
        if each.table is not None and each.table not in tables:
            raise ValueError(f"{each.table} has no Parquet file")


def _count(entry: Mapping[str, Any], name: str) -> int:
    value = whole(entry[name])
    if value is None:
        raise ValueError(f"{name} is {shown(str(entry[name]))}, which is no count")
    return value


def _digest(entry: Mapping[str, Any]) -> str:
    value = entry["sha256"]
    if not isinstance(value, str) or _SHA256.fullmatch(value) is None:
        raise ValueError("a digest is none")
    return value


def _names(value: Any) -> tuple[str, ...]:
    names = tuple(value)
    if not all(isinstance(name, str) and _COLUMN.fullmatch(name) for name in names):
        raise ValueError("a column has no name")
    return names


def _refused(path: Path, what: str) -> SessionError:
    return SessionError(f"{path}: {what}; restore the recorded file")
