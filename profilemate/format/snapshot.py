# SPDX-License-Identifier: Apache-2.0
"""A session made out of what another one has at a moment: its name, its files, and what its
metadata.json says.

``profilemate snapshot`` and the collector both make them. ``docs/snapshot.md`` has more.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, BinaryIO

from profilemate.format.errors import SessionError, unreadable
from profilemate.format.folder import Folder
from profilemate.format.segments import folder_name
from profilemate.format.session import SEGMENTS_FOLDER

BY_HAND = "by hand"
"""The reason of a snapshot that somebody asked ``profilemate snapshot`` for."""

_PART_BYTES = 1 << 20


def name_of(session: str, now: datetime) -> str:
    """The name of a snapshot of this session, taken now (UTC)."""
    return f"{prefix_of(session)}{now:%Y%m%d_%H%M%S}Z"


def prefix_of(session: str) -> str:
    """What the names of all snapshots of this session begin with."""
    return f"{session}_snapshot_"


def wanted(ends: Sequence[float], end_sec: float, last_sec: float | None) -> int:
    """From which closed segment on to take them all, so that they cover so long before the end.

    The newest is always taken: it explains how the open one begins.

    Args:
        ends: when each of them ends, in seconds.
        end_sec: the end of the snapshot.
        last_sec: how long; None: all.

    """
    if last_sec is None:
        return 0
    covered = sum(end <= end_sec - last_sec for end in ends[:-1])
    return min(covered, max(0, len(ends) - 1))


def link_segments(source: Folder, target: Folder, files: Mapping[int, Iterable[str]]) -> None:
    """Give a snapshot these segments of a session.

    Args:
        source: the session's folder of segments.
        target: the snapshot's folder.
        files: the names of the files to take, by the segment's number.

    Raises:
        FileNotFoundError: one is not there any more.
        SessionError: one cannot be read.
        OSError: one cannot be written.

    """
    if not files:
        return
    target.make_folder(SEGMENTS_FOLDER)
    with target.folder(SEGMENTS_FOLDER) as segments:
        for number, names in files.items():
            name = folder_name(number)
            segments.make_folder(name)
            with source.anyones_folder(name) as old, segments.folder(name) as new:
                for file in names:
                    link(old, new, file)


def link(source: Folder, target: Folder, name: str) -> None:
    """Give a file a second name in another folder; copy it where that cannot be.

    Raises:
        FileNotFoundError: it is not there any more.
        SessionError: it cannot be read.
        OSError: it cannot be written.

    """
    info = source.stat(name)
    # Another user's file, or one that others may read, would stay so under its second name.
    if info is not None and info.st_uid == os.geteuid() and info.st_mode == stat.S_IFREG | 0o600:
        with contextlib.suppress(OSError):
            os.link(name, name, src_dir_fd=source.fd, dst_dir_fd=target.fd, follow_symlinks=False)
            return
    copy(source, target, name)


def copy(source: Folder, target: Folder, name: str) -> None:
    """Copy a file into another folder; raises as ``link`` does."""
    with _reader(source, name) as old, new_file(target, name) as new:
        while part := old.read(_PART_BYTES):
            new.write(part)


def new_file(folder: Folder, name: str) -> BinaryIO:
    """A new file in the folder, to write to."""
    return open(folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def _reader(folder: Folder, name: str) -> BinaryIO:
    try:
        # Opening a pipe that nobody writes to would wait for a writer.
        fd = folder.open(name, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(folder.path / name, error) from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return open(fd, "rb")
    os.close(fd)
    what = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "it is no plain file"
    raise SessionError(f"cannot read {folder.path / name}: {what}")


def metadata_of(
    metadata: Mapping[str, Any],
    *,
    of: str,
    reason: str,
    now: datetime,
    window: Mapping[str, Any] | None,
    segments: int,
    complete: bool,
    was_running: bool,
    **changes: Any,
) -> dict[str, Any]:
    """A snapshot's metadata.json: the session's, of which all is true that is said in the snapshot.

    Args:
        metadata: the session's.
        of: the session's name.
        reason: why the snapshot was taken.
        now: the wall clock (UTC).
        window: what it is of the run, as in metadata.json; None: all until now.
        segments: how many closed ones it has.
        complete: whether the session has recorded all until now.
        was_running: vLLM goes on.
        **changes: other entries of it that differ from the session's.

    """
    kept = {key: value for key, value in metadata.items() if key != "snapshots"}
    return {
        **kept,
        **changes,
        "complete": complete,
        "segments": segments,
        "window": window,
        "snapshot": {
            "of": of,
            "taken_at": iso(now, "seconds"),
            "begin_sec": 0.0 if window is None else window["begin_sec"],
            "was_running": was_running,
            "reason": reason,
        },
    }


def end_of(started_at: float, end_sec: float) -> str:
    """The wall clock of the last time that a running session has recorded.

    Args:
        started_at: the wall clock at second 0 of the session, in seconds since 1970.
        end_sec: that time, in seconds of the session.

    """
    # Rounded down: the tables have microseconds, and a time of day is no more exact than that.
    after = timedelta(milliseconds=math.floor(end_sec * 1e3))
    return iso(datetime.fromtimestamp(started_at, timezone.utc) + after, "microseconds")


def has_no_gap(processes: Iterable[Mapping[str, Any]], dropped_events: float | None) -> bool:
    """Whether a running session has recorded all so far, as ``complete`` says it of one that has
    ended.

    Args:
        processes: what metadata.json says of each.
        dropped_events: the same of the session.

    """
    failed = any(
        process.get("problem") or process.get("hooks_failed") or process.get("lost")
        for process in processes
    )
    return not failed and not dropped_events


def iso(moment: datetime, timespec: str) -> str:
    """A moment (UTC) as ``metadata.json`` writes it."""
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")
