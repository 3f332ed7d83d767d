# SPDX-License-Identifier: Apache-2.0
"""Which files is each table made of?

A table of a short session is one file. A long session is cut into segments: the rows of a table are
those of its files in ``segments/0001``, ``segments/0002`` and so on, which are packed, then those
in ``segments/.closing-N``, a segment on its way there, and then those of the session's own folder.
``docs/session-format.md`` has the format.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from analysis.errors import SessionError, unreadable
from analysis.tables import segment_index
from analysis.tables.files import Held
from analysis.tables.pieces import Piece
from analysis.tables.schema import TABLES, Table
from analysis.tables.segment_index import SegmentIndex
from profilemate.format.segments import (
    CLOSING_PREFIX,
    INDEX_FILE,
    folder_name,
    opening_name,
    packed_name,
)
from profilemate.format.session import SEGMENTS_FOLDER

_NAME = re.compile(rf"({re.escape(CLOSING_PREFIX)})?([0-9]{{4,9}})")

_TRIES = 100
"""Closing a segment takes a collector far longer than listing and opening the files."""

_MOST_HELD = 512
"""Files that are held open at most: where a process may have few files, it needs some others."""


@dataclass(frozen=True)
class Segment:
    """A closed segment. ``tables``: its packed files with the rows of each table, by table."""

    number: int
    folder: Path
    index: SegmentIndex
    tables: Mapping[str, Piece]
    openings: Mapping[str, Piece]
    """Its files that explain how things stood when it began, by table."""


@dataclass(frozen=True)
class Files:
    """What a session's tables are made of.

    ``segments``: the closed ones, the oldest first. ``first``: the number of the first segment that
    is left, closed or not; None where there is none. ``plain``: the files of each table that are
    not packed, by table.
    """

    segments: tuple[Segment, ...] = ()
    first: int | None = None
    plain: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)

    def of(self, table: Table) -> tuple[Piece, ...]:
        """The table's files in the order of its rows, with the opening rows of a window first."""
        closed = [one.tables[table.name] for one in self.segments if table.name in one.tables]
        return (*self._opening(table), *closed, *self.plain.get(table.name, ()))

    def text_bytes(self) -> int:
        """Bytes of all tables together, before they were packed, without openings."""
        return sum(
            piece.text_bytes()
            for table in TABLES.values()
            for piece in self.of(table)
            if piece.before_sec is None
        )

    def _opening(self, table: Table) -> Sequence[Piece]:
        if not self.segments or self.segments[0].number == 1:
            return ()
        opening = self.segments[0].openings.get(table.name)
        return () if opening is None else (opening,)


@dataclass(frozen=True)
class _Listing:
    """The numbers of the closed segments, and what is in the folders of those being closed."""

    closed: tuple[int, ...] = ()
    closing: Mapping[int, frozenset[str]] = field(default_factory=dict)


def find(directory: Path, *, hold: bool) -> Files:
    """The files of a session's tables.

    Args:
        directory: the session's folder.
        hold: a collector may still close segments, and remove old ones. So the files are opened
            now, and stay readable as long as the answer lives.

    Raises:
        SessionError: a segment is missing, or one of its files is missing or damaged.

    """
    for _ in range(_TRIES):
        listing = _listing(directory)
        try:
            found = _files(directory, listing)
            found = _held(found) if hold else found
        except SessionError:
            if _listing(directory) == listing:
                raise
        else:
            if not hold or _listing(directory) == listing:
                return found
    raise SessionError(f"{directory / SEGMENTS_FOLDER} changes all the time; try again")


def has_segments(directory: Path) -> bool:
    """Whether the folder has a closed segment, or one that is being closed."""
    try:
        listing = _listing(directory)
    except SessionError:
        return False
    return bool(listing.closed or listing.closing)


def _listing(directory: Path) -> _Listing:
    folder = directory / SEGMENTS_FOLDER
    closed: list[int] = []
    closing: dict[int, frozenset[str]] = {}
    try:
        if folder.is_symlink():
            raise SessionError(f"{folder} is a link; put the recorded folder in its place")
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None or folder_name(int(match[2])) != match[2] or not int(match[2]):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    raise SessionError(f"{entry.path} is no folder; restore the recorded one")
                if match[1] is None:
                    closed.append(int(match[2]))
                else:
                    closing[int(match[2])] = _names(Path(entry.path))
    except FileNotFoundError:
        return _Listing()
    except OSError as error:
        raise unreadable(folder, error) from None
    closed.sort()
    # A folder of a closed segment is only not removed yet.
    left = {
        number: closing[number] for number in sorted(closing) if number > max(closed, default=0)
    }
    return _Listing(tuple(closed), left)


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except FileNotFoundError:
        return frozenset()


def _files(directory: Path, listing: _Listing) -> Files:
    folder = directory / SEGMENTS_FOLDER
    numbers = (*listing.closed, *listing.closing)
    for before, number in pairwise(numbers):
        if number != before + 1:
            raise SessionError(
                f"{folder / folder_name(before + 1)} is missing, and {folder_name(number)} is "
                "there; restore the recorded folder"
            )
    closing = {
        table.name: [
            Piece(folder / f"{CLOSING_PREFIX}{folder_name(number)}" / table.file, in_segment=True)
            for number, names in listing.closing.items()
            if table.file in names
        ]
        for table in TABLES.values()
    }
    return Files(
        tuple(_segment(folder / folder_name(number), number) for number in listing.closed),
        numbers[0] if numbers else None,
        {
            table.name: (*closing[table.name], Piece(directory / table.file))
            for table in TABLES.values()
        },
    )


def _segment(folder: Path, number: int) -> Segment:
    try:
        index = segment_index.read(folder)
    except OSError as error:
        raise unreadable(folder / INDEX_FILE, error) from None
    tables, openings = {}, {}
    for table in TABLES.values():
        name, opening = packed_name(table.file, number), opening_name(table.file)
        if name in index.files:
            tables[table.name] = Piece(folder / name, True, index.files[name])
        if opening in index.files:
            openings[table.name] = Piece(
                folder / opening, True, index.files[opening], index.begin_sec
            )
    return Segment(number, folder, index, tables, openings)


def _held(files: Files) -> Files:
    """The same, opened. The oldest segments are the first to be removed, so they come first."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = _MOST_HELD if soft == resource.RLIM_INFINITY else min(_MOST_HELD, soft // 4)

    def held(piece: Piece) -> Iterator[Piece]:
        nonlocal left
        try:
            if left:
                piece = replace(piece, held=Held(piece.path, follow=not piece.in_segment))
                left -= 1
        except FileNotFoundError as error:
            if piece.in_segment:
                raise unreadable(piece.path, error) from None
            return  # It has no row yet.
        except OSError:
            pass  # It is said when the table is read.
        yield piece

    def each(pieces: Mapping[str, Piece]) -> Mapping[str, Piece]:
        return {name: one for name, piece in pieces.items() for one in held(piece)}

    plain = {
        name: tuple(one for piece in pieces for one in held(piece))
        for name, pieces in files.plain.items()
    }
    segments: list[Segment] = []
    for segment in files.segments:
        # Only the first one's openings are read.
        openings = segment.openings if segments else each(segment.openings)
        segments.append(replace(segment, openings=openings, tables=each(segment.tables)))
    return Files(tuple(segments), files.first, plain)
