# SPDX-License-Identifier: Apache-2.0
"""Make a Parquet session out of a session."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source

from analysis import Session, open_session
from analysis.errors import SessionError, unreadable
from analysis.tables import parquet_index
from analysis.tables.files import opened
from analysis.tables.kept_text import FILE_COLUMN, PART_BYTES, TEXT_COLUMN
from analysis.tables.parquet_table import PARQUET_VERSION
from analysis.tables.pieces import Piece
from analysis.tables.schema import TABLES
from analysis.tables.storage import Store
from profilemate import __version__
from profilemate.collector.metadata import SUMMARY_FILE
from profilemate.commands.pack_table import OtherwiseWrittenError, Source, pack_table
from profilemate.commands.shared.new_folder import made
from profilemate.format.marks import MARKS_FILE
from profilemate.format.parquet import INDEX_FILE, SUFFIX, TEXTS_FILE
from profilemate.format.segments import INDEX_FILE as SEGMENT_FILE
from profilemate.format.session import JOURNAL_FOLDER, METADATA_FILE
from profilemate.format.totals import TOTALS_FILE
from profilemate.format.urls import is_url, url_of

COPIED = (METADATA_FILE, TOTALS_FILE, MARKS_FILE, SUMMARY_FILE)
_LOG = ".log"
_TEXTS_OF_A_GROUP = 16

Progress = Callable[[int, int], None]
"""Takes the bytes of text done so far, and in all."""


@dataclass(frozen=True)
class Packed:
    """``place``: the Parquet session's folder or URL. ``text_bytes``: of the tables that it has;
    ``bytes``: that it takes. ``as_text``: the tables whose text is kept."""

    place: str
    text_bytes: int
    bytes: int
    as_text: tuple[str, ...]


def pack(path: Path | None, target: Path | None, progress: Progress | None) -> Packed:
    """Make the Parquet session, whole or not at all.

    Args:
        path: a session's folder, or one of sessions, as ``open_session`` takes it.
        target: the new folder, or a URL; None for a folder beside the session, or in the current
            one where the session is a URL.
        progress: told how far it is.

    Raises:
        SessionError: the session cannot be packed, the target is there, or cannot be written.

    """
    session = open_session(path)
    _refuse(session)
    if target is not None and is_url(target):
        return _to_storage(session, url_of(target), progress)
    name = f"{session.directory.resolve().name}{SUFFIX}"
    beside = session.outputs if session.url else session.directory.resolve().parent
    place = Path(os.path.abspath(beside / name if target is None else target))
    with made(place) as scratch:
        return _packed(str(place), scratch, session, progress)


def _packed(place: str, scratch: Path, session: Session, progress: Progress | None) -> Packed:
    text_bytes, as_text = _fill(scratch, session, progress or (lambda done, total: None))
    size = sum(each.stat().st_size for each in scratch.iterdir())
    return Packed(place, text_bytes, size, as_text)


def _to_storage(session: Session, url: str, progress: Progress | None) -> Packed:
    """Make the Parquet session in object storage. Its index comes last, so it is there whole or not
    at all."""
    store = Store(url)
    if store.objects():
        raise SessionError(f"{url} is there already; name another place with -o")
    with tempfile.TemporaryDirectory(prefix="profilemate-") as folder:
        packed = _packed(url, Path(folder), session, progress)
        names = sorted(each.name for each in Path(folder).iterdir() if each.name != INDEX_FILE)
        sent: list[str] = []
        try:
            for name in (*names, INDEX_FILE):
                sent.append(name)
                store.send(Path(folder, name), name)
        except BaseException:
            with suppress(SessionError):
                for name in sent:
                    store.remove(name)
            raise
    return packed


def _refuse(session: Session) -> None:
    directory = session.directory
    if parquet_index.is_there(directory):
        raise SessionError(f"{directory} is a Parquet session already")
    if session.state == "running":
        raise SessionError(
            f"{directory} still runs; pack it once it has ended, or take a snapshot of it "
            "('profilemate snapshot') and pack that"
        )
    if (directory / JOURNAL_FOLDER).is_dir():
        raise SessionError(
            f"{directory}: {JOURNAL_FOLDER}/ has what is not in the tables yet; complete it with "
            "'profilemate finalize', and pack it then"
        )


def _fill(scratch: Path, session: Session, progress: Progress) -> tuple[int, tuple[str, ...]]:
    texts, tables = _texts_of_segments(session), {}
    files: list[dict[str, Any]] = []
    as_text: list[str] = []
    sources = {table.name: _sources(session, table.name) for table in TABLES.values()}
    total = sum(each.piece.text_bytes() for found in sources.values() for each in found)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, total), total)

    for table in TABLES.values():
        found = sources[table.name]
        if not found:
            continue
        before = done
        try:
            packed = pack_table(scratch, table, found, advance)
        except OtherwiseWrittenError:
            as_text.append(table.name)
            texts += found
            done = before + sum(each.piece.text_bytes() for each in found)
        else:
            tables[table.name] = packed.table
            files += packed.files
    kept = _KeptTexts(scratch / TEXTS_FILE)
    kept.write(texts)
    files += kept.entries
    _copy(session.directory, scratch)
    index = {
        "parquet_version": PARQUET_VERSION,
        "profilemate": __version__,
        "session": session.directory.resolve().name,
        "tables": tables,
        "files": files,
    }
    _write(scratch / INDEX_FILE, json.dumps(index, indent=1).encode() + b"\n")
    return total, tuple(as_text)


def _sources(session: Session, table: str) -> list[Source]:
    """The files of a table, in the order of their rows, openings not included."""
    pieces = [
        piece
        for piece in session.files.of(TABLES[table])
        if piece.before_sec is None and piece.is_there()
    ]
    return [Source(_inside(piece.path, session), piece) for piece in pieces]


def _texts_of_segments(session: Session) -> list[Source]:
    """The indexes of the closed segments, and their openings, by segment."""
    found = []
    for segment in session.files.segments:
        index = Piece(segment.folder / SEGMENT_FILE, in_segment=True)
        pieces = [index, *segment.openings.values()]
        found += [Source(_inside(piece.path, session), piece) for piece in pieces]
    return found


def _inside(path: Path, session: Session) -> str:
    return path.relative_to(session.directory).as_posix()


class _KeptTexts:
    """The file of the texts that are kept, and their entries of the index."""

    def __init__(self, path: Path) -> None:
        self.entries: list[dict[str, Any]] = []
        self._path = path

    def write(self, sources: list[Source]) -> None:
        """Write the texts of these files; nothing where there are none.

        Raises:
            SessionError: one cannot be read.

        """
        if not sources:
            return
        kinds = {FILE_COLUMN: pl.String, TEXT_COLUMN: pl.Binary}

        def read(*_: Any) -> Iterator[pl.DataFrame]:
            parts = 0
            for source in sources:
                first = parts
                size = lines_end = 0
                digest = hashlib.sha256()
                with source.piece.text() as file:
                    while text := file.read(PART_BYTES):
                        digest.update(text)
                        if (end := text.rfind(b"\n") + 1) > 0:
                            lines_end = size + end
                        size += len(text)
                        parts += 1
                        rows = {FILE_COLUMN: [source.path], TEXT_COLUMN: [text]}
                        yield pl.DataFrame(rows, schema=kinds)
                entry = {"first": first, "parts": parts - first, "bytes": size}
                about = {"sha256": digest.hexdigest(), "lines_end": lines_end}
                self.entries.append({"path": source.path, **entry, **about})

        register_io_source(read, schema=kinds).sink_parquet(
            self._path, compression="zstd", row_group_size=_TEXTS_OF_A_GROUP, statistics=False
        )
        os.chmod(self._path, 0o600)


def _copy(directory: Path, scratch: Path) -> None:
    """Copy what is no table: what ran, the totals, marks, and logs."""
    logs = sorted(each.name for each in directory.iterdir() if each.name.endswith(_LOG))
    for name in (*COPIED, *logs):
        with suppress(FileNotFoundError):
            try:
                with opened(directory / name, follow=False) as file:
                    _write(scratch / name, file.read())
            except FileNotFoundError:
                raise
            except OSError as error:
                raise unreadable(directory / name, error) from None


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
