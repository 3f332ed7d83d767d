# SPDX-License-Identifier: Apache-2.0
"""Take snapshots of the session that is followed, one at a time.

The open segment is cut. Once it is closed, a thread links the closed segments that are wanted into
a folder beside the session, which gets its name when it is whole. Following goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from profilemate.collector import leftovers, metadata
from profilemate.collector.follower import Follower, Papers
from profilemate.collector.log import complain
from profilemate.collector.rotation import Rotation
from profilemate.collector.segments import Closed, files_of
from profilemate.collector.snapshot_log import BY_SIGNAL, Taken
from profilemate.format import snapshot
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.marks import MARKS_FILE
from profilemate.format.session import METADATA_FILE, SEGMENTS_FOLDER
from profilemate.format.when import Limit

CUT_SEC = 60.0
"""A segment that cannot be closed for so long, such as where a journal is damaged, will not be."""

TRIES = 5
"""Seconds in which the name of a snapshot may be taken by another one."""


@dataclass
class Asked:
    """Whether somebody asks for a snapshot ``now``. A signal's handler sets it, which may interrupt
    whoever reads it: so it is a plain value, and no lock is in it."""

    now: bool = False


@dataclass
class _Job:
    """A snapshot on its way. ``papers``: what goes into it beside the segments up to ``last``, from
    the moment of the cut."""

    reason: str
    began: float = field(default_factory=time.monotonic)
    papers: Papers | None = None
    last: int = 0
    end_sec: float = 0.0


class Snapshots:
    """The snapshots of one session. ``last_sec``: how much before its end each covers, at least."""

    def __init__(
        self, follower: Follower, rotation: Rotation, limit: Limit, last_sec: float
    ) -> None:
        self._follower = follower
        self._rotation = rotation
        self._limit = limit
        self._last_sec = last_sec
        self._is_asked = False
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self._result: Taken | str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether one is on its way."""
        return self._job is not None or self._is_asked

    def ask(self) -> None:
        """Somebody asks for one, which comes when the one on its way, if any, is there."""
        self._is_asked = True

    def fire(self, reasons: Sequence[str], at_sec: float) -> None:
        """Take one, if the limit allows it. ``at_sec``: now, in seconds of the session."""
        if not reasons:
            return
        log = self._follower.snapshots
        before = log.by_itself
        is_soon = bool(before) and at_sec - before[-1].at_sec < self._limit.between_sec
        if self._job is not None or is_soon or len(before) >= self._limit.most:
            log.left_out += 1
        else:
            self._begin("; ".join(reasons))

    def turn(self, applied_ns: int) -> bool:
        """Do what is due. All episodes up to ``applied_ns`` have been applied, and no later one.

        Returns whether one has been taken, or could not be, since the last call.
        """
        if self._job is None:
            if not self._is_asked:
                return False
            self._is_asked = False
            self._begin(BY_SIGNAL)
        assert self._job is not None
        if self._thread is None:
            problem = self._cut(self._job, applied_ns)
            if problem is not None:
                self._end(problem)
                return True
            return False
        if self._result is None:
            return False
        self._thread.join()
        self._end(self._result)
        return True

    def _begin(self, reason: str) -> None:
        self._job = _Job(reason)
        self._rotation.is_held = True

    def _end(self, result: Taken | str) -> None:
        if isinstance(result, Taken):
            self._follower.snapshots.add(result)
        else:
            self._follower.snapshots.fail(result)
            complain(f"no snapshot: {result}; the session goes on")
        self._job = self._thread = self._result = None
        self._rotation.is_held = False

    def _cut(self, job: _Job, applied_ns: int) -> str | None:
        """Have the open segment closed, then begin to link; returns what is wrong, if anything."""
        follower = self._follower
        segments = follower.segments
        if segments.problem is not None:
            return segments.problem
        if segments.is_closing:
            return None
        if job.papers is not None:
            self._link_in_thread(job, job.papers)
            return None
        if not follower.tables.open_bytes and not segments.closed:
            return "nothing has been recorded yet"
        if applied_ns and follower.can_be_saved:
            job.papers = follower.papers()
            job.end_sec = follower.seconds(applied_ns)
            job.last = segments.number if follower.tables.open_bytes else segments.number - 1
            if follower.tables.open_bytes:
                try:
                    self._rotation.cut(applied_ns)
                except OSError as error:
                    return f"the tables cannot be cut: {error.strerror}"
        elif time.monotonic() - job.began > CUT_SEC:
            return "the journals cannot be read up to a moment at which they could be cut"
        return None

    def _link_in_thread(self, job: _Job, papers: Papers) -> None:
        closed = [each for each in self._follower.segments.closed if each.number <= job.last]
        ends = [each.end_sec for each in closed]
        taken = closed[snapshot.wanted(ends, job.end_sec, self._last_sec) :]

        def work() -> None:
            try:
                self._result = _make(self._follower, job, papers, taken)
            except (OSError, SessionError) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                self._result = f"it cannot be written: {reason or error}"
            except Exception as error:
                # A fault of ours must not hold up the next one.
                self._result = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=work, name="snapshot", daemon=True)
        self._thread.start()


def _make(follower: Follower, job: _Job, papers: Papers, taken: Sequence[Closed]) -> Taken:
    """Make the folder, whole or not at all.

    Raises:
        OSError, SessionError: it cannot be made.

    """
    session = follower.folder
    of = session.name
    with session.parent() as parent:
        if not parent.holds(session, of):
            raise SessionError(f"{session.path} was renamed")
        for left in reversed(range(TRIES)):
            now = datetime.now(timezone.utc)
            name = snapshot.name_of(of, now)
            scratch = leftovers.snapshot_scratch_name(name)
            parent.make_folder(scratch)
            try:
                content = _metadata(follower, job, papers, taken, now)
                with parent.folder(scratch) as folder:
                    _fill(folder, follower, papers, taken, content)
                parent.rename(scratch, name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not left:
                    raise
                # Another one was taken in the same second.
                time.sleep(1)
            else:
                return Taken(name, job.reason, round(job.end_sec, 6))
            finally:
                with contextlib.suppress(OSError, SessionError):
                    parent.remove_folder(scratch)
    raise AssertionError


def _fill(
    folder: Folder,
    follower: Follower,
    papers: Papers,
    taken: Sequence[Closed],
    content: dict[str, Any],
) -> None:
    with follower.folder.folder(SEGMENTS_FOLDER) as source:
        files = {each.number: files_of(source, each.number) for each in taken}
        snapshot.link_segments(source, folder, files)
    with contextlib.suppress(FileNotFoundError):
        snapshot.copy(follower.folder, folder, MARKS_FILE)
    for name, text in papers.files.items():
        folder.write(name, text)
    folder.write(METADATA_FILE, metadata.as_bytes(content))


def _metadata(
    follower: Follower, job: _Job, papers: Papers, taken: Sequence[Closed], now: datetime
) -> dict[str, Any]:
    said = papers.metadata
    return snapshot.metadata_of(
        said,
        of=follower.folder.name,
        reason=job.reason,
        now=now,
        window=metadata.window(taken),
        segments=len(taken),
        complete=snapshot.has_no_gap(said["processes"], said["dropped_events"]),
        was_running=True,
        ended_at=snapshot.end_of(follower.founding.started_at, said["duration_sec"]),
    )
