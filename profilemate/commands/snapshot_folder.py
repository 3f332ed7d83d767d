# SPDX-License-Identifier: Apache-2.0
"""Make a session's folder out of what another session has now."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from analysis import Session, open_session
from analysis.errors import SessionError, unreadable
from analysis.tables.files import opened
from analysis.tables.metadata import number, part, parts, wall_clock, whole
from analysis.tables.schema import FORMAT_VERSION, TABLES
from analysis.tables.segments import Segment, find
from analysis.tables.window import Window
from profilemate.collector.metadata import SUMMARY_FILE
from profilemate.format.segments import INDEX_FILE, folder_name
from profilemate.format.session import METADATA_FILE, SEGMENTS_FOLDER
from profilemate.format.totals import TOTALS_FILE

_TRIES = 20
"""While the files are linked, the session may remove its oldest segment, once in minutes."""

_PART_BYTES = 1 << 20


def take(path: Path | None, now: datetime, *, last_sec: float | None, target: Path | None) -> Path:
    """Make the snapshot, whole or not at all; returns its folder.

    Args:
        path: a session's folder, or one of sessions, as ``open_session`` takes it.
        now: the wall clock.
        last_sec: take the segments that cover at least so long before the end; None: all.
        target: the snapshot's folder; None for one beside the session.

    Raises:
        SessionError: the session cannot be read, the target is there, or it cannot be written.

    """
    for _ in range(_TRIES):
        session = open_session(path)
        place = _place(session, now) if target is None else Path(os.path.abspath(target))
        try:
            with _made(place) as scratch:
                _fill(scratch, session, _wanted(session, last_sec), now)
            return place
        except _GoneError:
            continue
    raise SessionError(f"{session.directory} removes its segments all the time; try again")


class _GoneError(Exception):
    """A segment was removed meanwhile."""


def _place(session: Session, now: datetime) -> Path:
    folder = session.directory.resolve()
    return folder.with_name(f"{folder.name}_snapshot_{now:%Y%m%d_%H%M%S}Z")


@contextlib.contextmanager
def _made(place: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is full, and goes if it cannot be filled."""
    scratch = place.with_name(f".{place.name}.{os.getpid()}.{os.urandom(3).hex()}")
    if os.path.lexists(place):
        raise SessionError(f"{place} is there already; name another folder with -o")
    try:
        os.mkdir(scratch, 0o700)
    except OSError as error:
        raise SessionError(f"cannot write {place}: {error.strerror}") from None
    try:
        yield scratch
        os.rename(scratch, place)
    except OSError as error:
        raise SessionError(f"cannot write {place}: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wanted(session: Session, last_sec: float | None) -> tuple[Segment, ...]:
    """The segments to take. The newest is always one: it explains how the open one begins."""
    segments = session.files.segments
    if last_sec is None:
        return segments
    begin_sec = session.end_sec - last_sec
    return tuple(one for one in segments[:-1] if one.index.end_sec > begin_sec) + segments[-1:]


def _fill(folder: Path, session: Session, segments: tuple[Segment, ...], now: datetime) -> None:
    if segments:
        os.mkdir(folder / SEGMENTS_FOLDER, 0o700)
    for segment in segments:
        target = folder / SEGMENTS_FOLDER / folder_name(segment.number)
        os.mkdir(target, 0o700)
        for name in (INDEX_FILE, *segment.index.files):
            _link(segment.folder / name, target / name)
    for table in TABLES.values():
        parts_of_text = session.plain_text(table.name)
        if (first := next(parts_of_text, None)) is not None:
            with _new(folder / table.file) as file:
                file.write(first)
                file.writelines(parts_of_text)
    for name in (SUMMARY_FILE, TOTALS_FILE):
        with contextlib.suppress(FileNotFoundError):
            _copy(session.directory / name, folder / name)
    text_bytes = find(folder, hold=False).text_bytes()
    metadata = _metadata(session, segments, text_bytes, now)
    with _new(folder / METADATA_FILE) as file:
        file.write(json.dumps(metadata, indent=2).encode() + b"\n")


def _link(source: Path, target: Path) -> None:
    """Give a segment's file a second name; copy it where that cannot be.

    Raises:
        _GoneError: it is not there any more.

    """
    try:
        info = os.lstat(source)
        # Another user's file, or one that others may read, would stay so under its second name.
        if info.st_uid == os.geteuid() and info.st_mode & 0o7777 == 0o600:
            with contextlib.suppress(OSError):
                os.link(source, target, follow_symlinks=False)
                return
        _copy(source, target)
    except FileNotFoundError:
        raise _GoneError from None


def _copy(source: Path, target: Path) -> None:
    """Raises FileNotFoundError where there is no source."""
    try:
        file = opened(source, follow=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(source, error) from None
    with file, _new(target) as copy:
        shutil.copyfileobj(file, copy, _PART_BYTES)


def _new(path: Path) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _metadata(
    session: Session, segments: tuple[Segment, ...], text_bytes: int, now: datetime
) -> Mapping[str, Any]:
    """The session's, of which all is true that is said in the snapshot."""
    metadata = session.metadata
    left_out = sum(
        piece.text_bytes()
        for segment in session.files.segments
        if segment.number < (segments[0].number if segments else 0)
        for piece in segment.tables.values()
    )
    left = session.window or Window(0.0, 0, 0)
    removed_bytes, removed_segments = left.removed_bytes + left_out, left.removed_segments
    window = None
    begin_sec = left.begin_sec
    if segments and segments[0].number > 1:
        begin_sec = segments[0].index.begin_sec
    if begin_sec:
        window = {
            "begin_sec": begin_sec,
            "removed_segments": segments[0].number - 1 if segments else removed_segments,
            "removed_bytes": removed_bytes,
        }
    cost = dict(part(metadata, "cost"))
    if whole(cost.get("table_bytes")) is not None:
        cost["table_bytes"] = text_bytes + removed_bytes
    return {
        "format_version": FORMAT_VERSION,
        **metadata,
        "ended_at": metadata.get("ended_at") or _end(session),
        "duration_sec": session.end_sec,
        "complete": session.state == "complete" or _has_no_gap(session),
        "segments": len(segments),
        "window": window,
        "cost": cost,
        "snapshot": {
            "of": session.directory.resolve().name,
            "taken_at": _iso(now, "seconds"),
            "begin_sec": begin_sec,
            "was_running": session.goes_on,
        },
    }


def _end(session: Session) -> str | None:
    """The wall clock of the last time that a running session has recorded."""
    began = wall_clock(session.metadata.get("started_at"))
    if began is None or session.state != "running":
        return None
    # Rounded down: the tables have microseconds, and a time of day is no more exact than that.
    after = timedelta(milliseconds=math.floor(session.end_sec * 1e3))
    return _iso(datetime.fromtimestamp(began, timezone.utc) + after, "microseconds")


def _has_no_gap(session: Session) -> bool:
    """Whether a running session has recorded all so far, as ``complete`` says it of one that has
    ended."""
    metadata = session.metadata
    failed = any(
        process.get("problem") or process.get("hooks_failed") or process.get("lost")
        for process in parts(metadata, "processes")
    )
    return session.state == "running" and not failed and not number(metadata.get("dropped_events"))


def _iso(moment: datetime, timespec: str) -> str:
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")
