# SPDX-License-Identifier: Apache-2.0
"""The end of an open table: its last rows, and those that come after."""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from analysis.tables.files import opened
from analysis.tables.schema import LONGEST_SEC, TABLES
from profilemate.format.segments import CLOSING_PREFIX

Row = Mapping[str, str]

END_BYTES = 64 << 10
"""What is read of a table of which the last rows are enough."""
FIRST_BYTES = 8 << 20
"""What is read at most of a table that is followed, the first time."""
MORE_BYTES = 2 << 20
"""The same, each time after that."""


def last_rows(
    session: Path, table: str, engines: Collection[int], until: Mapping[int, float] | None = None
) -> dict[int, Row]:
    """The last row of each of these engines, as far as it lies in the last ``END_BYTES`` of the
    table; none where it is missing, as for a moment after a cut, or cannot be read.

    ``until``: by engine, the time that its row has at most.
    """
    try:
        with opened(session / TABLES[table].file) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - END_BYTES))
            lines = file.read(END_BYTES).split(b"\n")
    except OSError:
        return {}
    found: dict[int, Row] = {}
    # The first line may be half of one, or is the header; after the last line end comes the rest.
    for row in rows_of(table, reversed(lines[1:-1])):
        rank = whole(row["engine"])
        if rank is None or rank in found or rank not in engines:
            continue
        if until is None or seconds(row["timestamp_sec"]) <= until.get(rank, 0.0):
            found[rank] = row
            if len(found) == len(engines):
                break
    return found


def rows_of(table: str, lines: Iterable[bytes]) -> Iterator[Row]:
    """The rows of these lines. One that is cut short, or longer than a row can be, is left out."""
    names = tuple(TABLES[table].columns)
    for line in lines:
        if len(line) <= TABLES[table].longest_line:
            cells = next(csv.reader([line.decode("utf-8", "replace")]), [])
            if len(cells) >= len(names):
                yield dict(zip(names, cells, strict=False))


def whole(cell: str) -> int | None:
    """The whole number in a cell; None where there is none."""
    return int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 19 else None


def seconds(cell: str) -> float:
    """The time in a cell; 0 where there is none."""
    try:
        found = float(cell)
    except ValueError:
        return 0.0
    return found if 0 <= found < LONGEST_SEC else 0.0


class Tail:
    """Follows a table: ``new_lines`` gives what has come since the last call.

    ``gap``: lines before those of the last call were not read. That is so the first time where the
    table is longer than ``FIRST_BYTES`` or begins after a cut, and later where more than
    ``MORE_BYTES`` have come, or the tables were cut more than once. The file is held open, so what
    came before a cut is read to its end.
    """

    def __init__(self, session: Path, table: str, *, first_bytes: int = FIRST_BYTES) -> None:
        self._session, self._table = session, TABLES[table]
        self._path = session / self._table.file
        self._limit = first_bytes
        self._fd: int | None = None
        self._at = 0
        self._half = b""
        self._cut = 0
        """The last segment that was cut when the file was opened."""
        self.gap = False

    def new_lines(self) -> list[bytes]:
        """The whole lines since the last call, without a header."""
        is_first, self.gap = self._fd is None, False
        if is_first and not self._open():
            self.gap = _last_cut(self._session) > 0
            return []
        lines = self._read(is_first=is_first)
        if is_first:
            self.gap = self.gap or self._cut > 0
        elif not self._is_current():
            lines = self._and_of_next(lines)
        self._limit = MORE_BYTES
        return lines

    def _and_of_next(self, lines: list[bytes]) -> list[bytes]:
        """These, which end a file, and those of the file that is the table now."""
        before = self._cut
        if not self._open():
            return lines
        had_gap, self.gap = self.gap, False
        more = self._read(is_first=True)
        # Between two cuts there was a file that was never opened.
        self.gap = self.gap or self._cut > before + 1
        if self.gap:
            return more
        self.gap = had_gap
        return lines + more

    def new_rows(self) -> list[Row]:
        """The same as rows of a CSV table."""
        return list(rows_of(self._table.name, self.new_lines()))

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        cut = _last_cut(self._session)
        try:
            with opened(self._path) as file:
                fd = os.dup(file.fileno())
        except OSError:
            return False
        self.close()
        self._fd, self._at, self._half = fd, 0, b""
        self._cut = cut
        return True

    def _is_current(self) -> bool:
        """Whether the file that is held open is still the table. A missing table counts so: after
        a cut it is made with its first row."""
        assert self._fd is not None
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return True

    def _read(self, *, is_first: bool) -> list[bytes]:
        """The whole lines that have not been read of the open file."""
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        begin = max(self._at, size - self._limit)
        if begin > self._at or size < self._at:
            # Nobody shortens a table: what is there now is something else.
            begin = max(0, size - self._limit)
            self.gap, self._half = True, b""
        content = os.pread(self._fd, size - begin, begin)
        self._at = begin + len(content)
        *lines, self._half = (self._half + content).split(b"\n")
        # The first line is half of one, or the header.
        has_header = is_first and self._table.is_csv
        return lines[1:] if self.gap or has_header else lines


def _last_cut(session: Path) -> int:
    """The number of the last segment that was cut: the rows of the open tables come after it. 0
    where there is none."""
    try:
        names = [name.removeprefix(CLOSING_PREFIX) for name in os.listdir(session / "segments")]
    except OSError:
        return 0
    return max((whole(name) or 0 for name in names), default=0)
