# SPDX-License-Identifier: Apache-2.0
"""Make a Parquet session what it was: the same files, with the same text."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import polars as pl

from analysis.errors import SessionError
from analysis.tables import parquet_index, remote
from analysis.tables.faults import shown
from analysis.tables.find import find_session
from analysis.tables.parquet_index import ParquetIndex, SourceFile
from analysis.tables.parquet_table import ParquetTable
from profilemate.collector.segments import LEVEL
from profilemate.commands.shared.new_folder import made
from profilemate.format.parquet import INDEX_FILE
from profilemate.format.urls import is_url

_GZIP = ".gz"
_GZIP_FORMAT = 31
"""zlib's number for it."""
_PART = 1 << 20

Progress = Callable[[int, int], None]
"""Takes the bytes of text done so far, and in all."""


def unpack(path: Path | None, target: Path | None, progress: Progress | None) -> Path:
    """Make the session, whole or not at all; returns its folder.

    Args:
        path: a Parquet session's folder, or one of sessions, of which the newest is taken.
        target: the new folder; None for one beside it, with the name that the session had.
        progress: told how far it is.

    Raises:
        SessionError: it is no Parquet session, it is damaged, the target is there, or cannot be
            written.

    """
    copy = remote.fetch(remote.sessions_at(path)[0]) if path and is_url(path) else None
    directory = find_session(path) if copy is None else copy.directory
    if not parquet_index.is_there(directory):
        raise SessionError(f"{directory} is no Parquet session: it has no {INDEX_FILE}")
    index = parquet_index.read(directory)
    beside = directory.resolve().parent if copy is None else Path.cwd()
    place = Path(os.path.abspath(beside / _name(index, directory) if target is None else target))
    total = sum(each.size for each in index.files)
    with made(place) as scratch:
        done = 0
        for file, text in _texts(index):
            _write(scratch, file, text)
            done += file.size
            if progress is not None:
                progress(done, total)
        _copy(directory, scratch)
    return place


def _name(index: ParquetIndex, directory: Path) -> str:
    """The name that the session had, which may be anything in an index of somebody else's."""
    name = index.session
    if not name.isprintable() or "/" in name or name[:1] in ("", "."):
        raise SessionError(
            f"{directory / INDEX_FILE}: {shown(name)} is no name for a folder; name one with -o"
        )
    return name


def _texts(index: ParquetIndex) -> Iterator[tuple[SourceFile, Iterator[bytes]]]:
    """Each file that the session had, with its text."""
    for table in index.tables.values():
        table.check()
        left = _Rows(table)
        for file in index.files:
            if file.table == table.table.name:
                yield file, left.text(file.rows)
    for file in index.files:
        if file.kept is not None:
            yield file, file.kept.text()


class _Rows:
    """Takes the rows of a table one file after the other."""

    def __init__(self, table: ParquetTable) -> None:
        self._table = table
        self._groups = table.stored_rows()
        self._rest = pl.DataFrame()

    def text(self, rows: int) -> Iterator[bytes]:
        """The text of a file with so many rows, its header included."""
        yield self._table.header
        while rows:
            if self._rest.is_empty():
                self._rest = next(self._groups)
            taken = self._rest.head(rows)
            self._rest = self._rest.slice(taken.height)
            rows -= taken.height
            yield self._table.lines_of(taken)


def _write(scratch: Path, file: SourceFile, text: Iterator[bytes]) -> None:
    """Write a file, and compare its text with the digest of the one that was packed."""
    path = scratch / file.path
    for folder in reversed(path.relative_to(scratch).parents):
        with suppress(FileExistsError):
            os.mkdir(scratch / folder, 0o700)
    known, size = hashlib.sha256(), 0
    with _written(path) as write:
        for part in text:
            known.update(part)
            size += len(part)
            write(part)
    if size != file.size or known.hexdigest() != file.sha256:
        raise SessionError(
            f"{file.path} does not come out as it was; restore the recorded Parquet files"
        )


@contextmanager
def _written(path: Path) -> Iterator[Callable[[bytes], object]]:
    """What writes a file's text, compressed where its name says so."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
        if path.suffix == _GZIP:
            # As the collector does it, so that the bytes are the same where zlib is.
            packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
            yield lambda text: _pack(target, packer.compress, text)
            target.write(packer.flush())
        else:
            yield target.write


def _pack(target: BinaryIO, compress: Callable[[bytes], bytes], text: bytes) -> None:
    begins = range(0, len(text), _PART)
    target.writelines(compress(text[begin : begin + _PART]) for begin in begins)


def _copy(directory: Path, scratch: Path) -> None:
    """Copy what is no table."""
    for each in sorted(directory.iterdir()):
        is_table = each.suffix == ".parquet" or each.name == INDEX_FILE
        if not is_table and each.is_file() and not each.is_symlink():
            fd = os.open(scratch / each.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(each.read_bytes())
