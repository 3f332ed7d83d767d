# SPDX-License-Identifier: Apache-2.0
"""Make a session's folder out of what another session has now."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis import Session, open_session
from analysis.errors import SessionError
from analysis.tables import parquet_index
from analysis.tables.metadata import number, part, parts, wall_clock, whole
from analysis.tables.schema import FORMAT_VERSION, TABLES
from analysis.tables.segments import Segment, find
from analysis.tables.window import Window
from profilemate.collector.metadata import SUMMARY_FILE
from profilemate.commands.shared.new_folder import made
from profilemate.format import snapshot
from profilemate.format.folder import Folder
from profilemate.format.marks import MARKS_FILE
from profilemate.format.segments import INDEX_FILE
from profilemate.format.session import METADATA_FILE, SEGMENTS_FOLDER
from profilemate.format.totals import TOTALS_FILE

_TRIES = 20
"""While the files are linked, the session may remove its oldest segment, once in minutes."""


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
        if parquet_index.is_there(session.directory):
            raise SessionError(
                f"{session.directory} is a Parquet session, which does not change: copy its folder"
            )
        place = _place(session, now) if target is None else Path(os.path.abspath(target))
        try:
            with made(place) as scratch:
                _fill(scratch, session, _wanted(session, last_sec), now)
            return place
        except _GoneError:
            continue
    raise SessionError(f"{session.directory} removes its segments all the time; try again")


class _GoneError(Exception):
    """A segment was removed meanwhile."""


def _place(session: Session, now: datetime) -> Path:
    folder = session.directory.resolve()
    return folder.with_name(snapshot.name_of(folder.name, now))


def _wanted(session: Session, last_sec: float | None) -> tuple[Segment, ...]:
    """The segments to take."""
    segments = session.files.segments
    ends = [one.index.end_sec for one in segments]
    return segments[snapshot.wanted(ends, session.end_sec, last_sec) :]


def _fill(path: Path, session: Session, segments: tuple[Segment, ...], now: datetime) -> None:
    with Folder.own(path) as folder:
        _link(folder, session, segments)
        for table in TABLES.values():
            parts_of_text = session.plain_text(table.name)
            if (first := next(parts_of_text, None)) is not None:
                with snapshot.new_file(folder, table.file) as file:
                    file.write(first)
                    file.writelines(parts_of_text)
        with Folder.anyones(session.directory) as source:
            for name in (SUMMARY_FILE, TOTALS_FILE, MARKS_FILE):
                with contextlib.suppress(FileNotFoundError):
                    snapshot.copy(source, folder, name)
        text_bytes = find(path, hold=False).text_bytes()
        metadata = _metadata(session, segments, text_bytes, now)
        folder.write(METADATA_FILE, json.dumps(metadata, indent=2).encode() + b"\n")


def _link(folder: Folder, session: Session, segments: tuple[Segment, ...]) -> None:
    """Give the snapshot these segments.

    Raises:
        _GoneError: one is not there any more.

    """
    if not segments:
        return
    files = {each.number: (INDEX_FILE, *each.index.files) for each in segments}
    try:
        with Folder.anyones(session.directory / SEGMENTS_FOLDER) as source:
            snapshot.link_segments(source, folder, files)
    except FileNotFoundError:
        raise _GoneError from None


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
    return snapshot.metadata_of(
        {"format_version": FORMAT_VERSION, **metadata},
        of=session.directory.resolve().name,
        reason=snapshot.BY_HAND,
        now=now,
        window=window,
        segments=len(segments),
        complete=session.state == "complete" or _has_no_gap(session),
        was_running=session.goes_on,
        ended_at=metadata.get("ended_at") or _end(session),
        duration_sec=session.end_sec,
        cost=cost,
    )


def _end(session: Session) -> str | None:
    """The wall clock of the last time that a running session has recorded."""
    began = wall_clock(session.metadata.get("started_at"))
    if began is None or session.state != "running":
        return None
    return snapshot.end_of(began, session.end_sec)


def _has_no_gap(session: Session) -> bool:
    """Whether a running session has recorded all so far."""
    metadata = session.metadata
    dropped = number(metadata.get("dropped_events"))
    return session.state == "running" and snapshot.has_no_gap(parts(metadata, "processes"), dropped)
