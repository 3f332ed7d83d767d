# SPDX-License-Identifier: Apache-2.0
"""Close parts of the tables while vLLM runs: compressed, with an index and a checkpoint.

A segment is what all tables have between two moments. At its end the open files move into a folder
of their own, and a thread compresses them; meanwhile new rows make new files. The closed segment
appears in one rename, with the state of everything at its end. From then on the journals' files
that led to it are not needed: who goes on from that state comes to the same tables. So a kill at
any moment leaves the last closed segment, and the journals of what follows it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from profilemate.collector import gpu_memory
from profilemate.collector.tables import COLUMNS, Tables, cut_torn_row, whole_rows
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.segments import (
    CLOSING_PREFIX,
    INDEX_FILE,
    OPENING_PREFIX,
    folder_name,
    packed_name,
)
from profilemate.format.session import SEGMENTS_FOLDER

FORMAT_VERSION = 1

CHECKPOINT_FILE = "checkpoint.json.gz"

_NUMBER = re.compile(r"\d{4,9}")
_NEW, _GONE = ".new-", ".gone-"

LEVEL = 1
"""Of zlib: 4 takes twice the time, and makes the files a tenth smaller."""

_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Closed:
    """A closed segment: when it begins and ends, in seconds of the session, and the bytes that its
    files take, without the state at its end. ``plain_bytes`` are those of its rows before
    compression, ``before_bytes`` the same of all segments before it."""

    number: int
    begin_sec: float
    end_sec: float
    size: int
    plain_bytes: int
    before_bytes: int


class Segments:
    """The closed segments of one session. ``closed`` has those that are there, the first one first.

    ``problem`` says why the last one could not be closed; None where it could.
    """

    def __init__(self, session: Folder) -> None:
        self.closed: list[Closed] = []
        self.problem: str | None = None
        self._session = session
        self._opening: Mapping[str, Sequence[str]] = {}
        self._thread: threading.Thread | None = None
        self._is_done = False
        self._result: Closed | None = None
        self._again: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        """The open segment's."""
        return self.closed[-1].number + 1 if self.closed else 1

    def size(self) -> int:
        """Bytes that all segments take: the closed ones, and all there is of the one that is being
        closed."""
        # The last one has the state, and what is being closed grows.
        settled = {folder_name(each.number): each.size for each in self.closed[:-1]}
        total = sum(settled.values())
        with contextlib.suppress(FileNotFoundError), self._session.folder(SEGMENTS_FOLDER) as here:
            for name in here.names():
                if name not in settled and here.has_folder(name):
                    with contextlib.suppress(FileNotFoundError), here.folder(name) as folder:
                        total += folder.size()
        return total

    @property
    def is_closing(self) -> bool:
        return self._thread is not None

    def restore(self) -> dict[str, Any] | None:
        """Find the segments that a collector before this one closed; returns what it saved at the
        end of the last one, None where there is none.

        Raises:
            SessionError: they cannot be read.

        """
        with contextlib.suppress(FileNotFoundError), self._session.folder(SEGMENTS_FOLDER) as here:
            numbers = sorted(int(name) for name in here.names() if _NUMBER.fullmatch(name))
            try:
                indexes = [_index(here, number) for number in numbers]
                if not indexes:
                    return None
                saved = _checkpoint(here, numbers[-1])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise SessionError(f"{here.path} cannot be read: {error}") from None
            sizes = [_size_of(here, number) for number in numbers]
            self.closed = [_closed(*each) for each in zip(indexes, sizes, strict=True)]
            self._opening = saved["opening"]
            state: dict[str, Any] = saved["state"]
            return state
        return None

    def clear(self) -> None:
        """Remove what a killed collector was about to close: its journals lead to it again. What
        was sampled, and is in no journal, goes back to where it was."""
        with contextlib.suppress(FileNotFoundError), self._session.folder(SEGMENTS_FOLDER) as here:
            for name in _being_closed(here):
                with here.folder(name) as closing:
                    _put_back(closing, self._session)
            for name in here.names():
                if name.startswith((CLOSING_PREFIX, _NEW, _GONE)):
                    here.remove_folder(name)

    def cut(
        self,
        tables: Tables,
        end_sec: float,
        saved: Mapping[str, Any],
        opening: Mapping[str, Sequence[str]],
    ) -> None:
        """End the open segment here, and begin to close it.

        Args:
            tables: the session's, which go on in new files.
            end_sec: the time, in seconds of the session.
            saved: the state of everything.
            opening: by table, rows that explain the beginning of the next segment.

        Raises:
            OSError: the files cannot be moved.

        """
        number = self.number
        last = self.closed[-1] if self.closed else Closed(0, 0.0, 0.0, 0, 0, 0)
        checkpoint = json.dumps({"state": saved, "opening": opening})
        if not self._session.has_folder(SEGMENTS_FOLDER):
            self._session.make_folder(SEGMENTS_FOLDER)
        name = f"{CLOSING_PREFIX}{folder_name(number)}"
        with self._session.folder(SEGMENTS_FOLDER) as here:
            # It is there where a call before this one could not move all files.
            if not here.has_folder(name):
                here.make_folder(name)
            with here.folder(name) as closing:
                tables.cut(closing)
        index = {
            "format_version": FORMAT_VERSION,
            "segment": number,
            "begin_sec": last.end_sec,
            "end_sec": end_sec,
            "before_bytes": last.before_bytes + last.plain_bytes,
        }
        self._close_in_thread(index, checkpoint.encode(), self._opening)
        self._opening = opening

    def _close_in_thread(
        self, index: dict[str, Any], checkpoint: bytes, opening: Mapping[str, Sequence[str]]
    ) -> None:
        def work() -> None:
            try:
                self._result = _close(self._session, index, checkpoint, opening)
            except Exception as error:
                self.problem = f"segment {index['segment']} cannot be closed: {error}"
            else:
                self.problem = None
            self._is_done = True

        self._again = partial(self._close_in_thread, index, checkpoint, opening)
        self._is_done = False
        self._thread = threading.Thread(target=work, name="closing", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Whether a segment has been closed since the last call."""
        if self._thread is None or not self._is_done:
            return False
        self._thread.join()
        if self.problem is not None or self._result is None:
            return False
        # Not in the thread: the oldest ones may be removed meanwhile.
        self.closed = [*self.closed, self._result]
        self._thread = self._result = None
        return True

    def retry(self) -> None:
        """Try again what could not be done."""
        if self._is_done and self.problem is not None and self._again is not None:
            self._again()

    def finish(self) -> bool:
        """Wait for the segment that is being closed, and try once more; returns whether it is."""
        for attempt in range(2):
            if attempt and self.problem is not None:
                self.retry()
            if self._thread is not None:
                self._thread.join()
        return self.poll()

    def forget_state(self) -> None:
        """The session is complete: nobody goes on from here."""
        if self.closed:
            name = folder_name(self.closed[-1].number)
            with self._session.folder(SEGMENTS_FOLDER) as here, here.folder(name) as last:
                last.remove(CHECKPOINT_FILE)

    def remove_first(self) -> None:
        """Remove the oldest segment, and what is left of one that could not be removed as a
        whole."""
        first, *rest = self.closed
        with self._session.folder(SEGMENTS_FOLDER) as here:
            name = folder_name(first.number)
            here.rename(name, f"{_GONE}{name}")
            self.closed = rest
            for gone in here.names():
                if gone.startswith(_GONE):
                    here.remove_folder(gone)


def rows_being_closed(session: Folder, table: str) -> int:
    """How many rows of a table are in a segment that a collector was about to close."""
    rows = 0
    with contextlib.suppress(FileNotFoundError), session.folder(SEGMENTS_FOLDER) as here:
        for name in _being_closed(here):
            with here.folder(name) as closing:
                rows += whole_rows(closing, table)
    return rows


def files_of(here: Folder, number: int) -> list[str]:
    """The names of a closed segment's files, but for the state at its end. ``here``: the folder of
    the segments."""
    return [INDEX_FILE, *_index(here, number)["tables"]]


def _being_closed(here: Folder) -> list[str]:
    """The folders of segments that are not closed yet."""
    return [
        name
        for name in here.names()
        if name.startswith(CLOSING_PREFIX) and not here.has(name.removeprefix(CLOSING_PREFIX))
    ]


def _index(here: Folder, number: int) -> dict[str, Any]:
    with here.folder(folder_name(number)) as folder:
        index: dict[str, Any] = json.loads(folder.read(INDEX_FILE))
    return index


def _checkpoint(here: Folder, number: int) -> dict[str, Any]:
    with here.folder(folder_name(number)) as folder:
        saved: dict[str, Any] = json.loads(gzip.decompress(folder.read(CHECKPOINT_FILE)))
    return saved


def _size_of(here: Folder, number: int) -> int:
    """Bytes that a segment's files take, without the state at its end."""
    with here.folder(folder_name(number)) as folder:
        return folder.size(without=CHECKPOINT_FILE)


def _closed(index: Mapping[str, Any], size: int) -> Closed:
    tables = index["tables"].items()
    # Opening rows repeat what earlier segments have.
    rows = (each for name, each in tables if not name.startswith(OPENING_PREFIX))
    plain = sum(each["plain_bytes"] for each in rows)
    return Closed(
        number=index["segment"],
        begin_sec=index["begin_sec"],
        end_sec=index["end_sec"],
        size=size,
        plain_bytes=plain,
        before_bytes=index["before_bytes"],
    )


def _put_back(closing: Folder, session: Folder) -> None:
    """Put what was sampled in front of what was sampled since."""
    table = gpu_memory.TABLE
    if not closing.has(table):
        return
    cut_torn_row(closing, table)
    if session.has(table):
        later = session.read(table).partition(b"\n")[2]
        fd = closing.open(table, os.O_WRONLY | os.O_APPEND)
        with open(fd, "wb") as file:
            file.write(later)
    closing.rename(table, table, session)


def _close(
    session: Folder,
    index: Mapping[str, Any],
    checkpoint: bytes,
    opening: Mapping[str, Sequence[str]],
) -> Closed:
    """Compress the files that are being closed, and let the segment appear.

    It can be called again after an error, whatever had been done by then.
    """
    number = index["segment"]
    name = folder_name(number)
    closing_name = f"{CLOSING_PREFIX}{name}"
    with session.folder(SEGMENTS_FOLDER) as here:
        if not here.has_folder(name):
            _pack(here, index, checkpoint, opening)
        os.fsync(here.fd)
        if here.has_folder(closing_name):
            here.remove_folder(closing_name)
        before = folder_name(number - 1)
        if here.has_folder(before):
            with here.folder(before) as folder:
                folder.remove(CHECKPOINT_FILE)
        return _closed(_index(here, number), _size_of(here, number))


def _pack(
    here: Folder,
    index: Mapping[str, Any],
    checkpoint: bytes,
    opening: Mapping[str, Sequence[str]],
) -> None:
    """Make the folder of a closed segment."""
    number = index["segment"]
    name = folder_name(number)
    new_name = f"{_NEW}{name}"
    if here.has_folder(new_name):
        here.remove_folder(new_name)
    here.make_folder(new_name)
    entries: dict[str, dict[str, Any]] = {}
    with here.folder(f"{CLOSING_PREFIX}{name}") as closing, here.folder(new_name) as new:
        for table, rows in opening.items():
            content = "\n".join([*filter(None, [COLUMNS[table]]), *rows, ""])
            data = content.encode("utf-8", "backslashreplace")
            entries[f"opening.{table}.gz"] = _compress([data], f"opening.{table}.gz", table, new)
        for table in closing.names():
            target = packed_name(table, number)
            with open(closing.open(table, os.O_RDONLY), "rb") as file:
                parts = iter(lambda: file.read(_PART_BYTES), b"")
                entries[target] = _compress(parts, target, table, new)
        _write(new, CHECKPOINT_FILE, [gzip.compress(checkpoint, 1, mtime=0)])
        _write(new, INDEX_FILE, [json.dumps({**index, "tables": entries}, indent=1).encode()])
        os.fsync(new.fd)
    here.rename(new_name, name)


def _compress(parts: Iterable[bytes], target: str, table: str, folder: Folder) -> dict[str, Any]:
    """Compress a table; returns its entry of the index."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, 31)
    checksum = plain_bytes = lines = 0
    first = last = b""

    def packed() -> Iterator[bytes]:
        nonlocal checksum, plain_bytes, lines, first, last
        for part in parts:
            first = first or part
            last = (last + part)[-2 * _PART_BYTES :] if len(part) < _PART_BYTES else part
            checksum, plain_bytes = zlib.crc32(part, checksum), plain_bytes + len(part)
            lines += part.count(b"\n")
            yield packer.compress(part)
        yield packer.flush()

    size = _write(folder, target, packed())
    has_header = COLUMNS[table] is not None
    return {
        "rows": lines - has_header,
        "bytes": size,
        "plain_bytes": plain_bytes,
        "crc32": f"{checksum:08x}",
        **_span(first, last, table),
    }


def _span(first: bytes, last: bytes, table: str) -> dict[str, float | None]:
    """The first and last time of a table whose rows begin with it."""
    header = COLUMNS[table]
    if header is None or not header.startswith("timestamp_sec,"):
        return {"first_sec": None, "last_sec": None}
    row = first.split(b"\n", 2)[1]
    end = last.rstrip(b"\n").rpartition(b"\n")[2]
    return {"first_sec": _time(row), "last_sec": _time(end)}


def _time(row: bytes) -> float | None:
    with contextlib.suppress(ValueError):
        return float(row.partition(b",")[0])
    return None


def _write(folder: Folder, name: str, parts: Iterable[bytes]) -> int:
    """Write a new file, down to the disk; returns its size."""
    size = 0
    with open(folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        for part in parts:
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return size
