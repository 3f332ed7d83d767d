# SPDX-License-Identifier: Apache-2.0
"""Follow a session while vLLM runs: journals in, tables out, until every producer is gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import NoReturn

from profilemate import config
from profilemate.collector import gpu_memory, leftovers
from profilemate.collector.endpoint import Endpoint
from profilemate.collector.follower import Follower
from profilemate.collector.gpu_memory import Sampler
from profilemate.collector.journal_reader import READ_BYTES
from profilemate.collector.log import complain
from profilemate.collector.pace import BEHIND_SEC, CAUGHT_UP_SEC, gently
from profilemate.collector.rotation import Rotation
from profilemate.collector.snapshots import Asked, Snapshots
from profilemate.collector.triggers import SECOND_NS, Triggers
from profilemate.collector.uploads import Uploads
from profilemate.format import session
from profilemate.format.errors import SessionError
from profilemate.format.files import FULL
from profilemate.format.folder import Folder
from profilemate.format.keep import DEFAULT, read_keep
from profilemate.format.when import Condition

POLL_SEC = 0.1
METADATA_SEC = 2.0
TOTALS_SEC = 1.0

BACKLOG_BYTES = READ_BYTES // 2
"""After a read of this much there is likely more: it is read without a pause."""

MERGE_NS = 400_000_000
"""Episodes of all producers are applied in the order of their times, so that the tables come out
the same whenever they are made. One counts as written this long after its time."""

FULL_SEC = 1.0
"""The pause where the disk is full."""

PACKING_SEC = 0.02
"""The pause where a segment has to be packed before more can be read."""

FIRST_SEC = 60.0
"""Who starts a collector has made a journal. Where none comes for so long, it was deleted."""


def follow(folder: Folder, journals: Folder, asked: Asked | None = None) -> None:
    """Follow the session to its end, and remove its journals when the tables are complete.

    Args:
        folder: the session's.
        journals: that of its journals.
        asked: whether somebody asks for a snapshot.

    Raises:
        SessionError: the session cannot be read, its journals were deleted meanwhile, or not all
            of them could be read.
        OSError: the tables cannot be written.

    """
    leftovers.clear(folder, locked=True)
    work = _Work(folder, journals, asked or Asked())
    while not work.is_done:
        gently(work.until_behind)
        if not work.is_done:
            work.until_caught_up()
    follower = work.follower
    if not follower.producers:
        return
    if follower.segments.is_closing and not follower.segments.finish():
        raise SessionError(f"{folder.path}: {follower.segments.problem}")
    follower.close()
    if follower.is_damaged:
        leftovers.keep_journals(folder, journals, session.JOURNAL_FOLDER)
        raise SessionError(f"not all journals could be read: {folder.path / session.KEPT_FOLDER}")
    leftovers.remove_journals(folder, journals, session.JOURNAL_FOLDER)
    follower.segments.forget_state()


class _Work:
    """What is done again and again until the session has ended. ``is_done``: it has."""

    def __init__(self, folder: Folder, journals: Folder, asked: Asked) -> None:
        founding = session.read_founding(journals)
        settings = config.read(os.environ)
        self.is_done = False
        endpoint = Endpoint(settings.metrics)
        self._uploads = Uploads(settings.upload, folder)
        sampler = Sampler(founding.origin_ns)
        self.follower = Follower(folder, folder, sampler, journals, endpoint, self._uploads)
        self.follower.segments.clear()
        self.follower.resume()
        self.follower.tables.begin_anew(gpu_memory.TABLE)
        self._folder = folder
        self._rotation = Rotation(self.follower, read_keep(founding.keep) or DEFAULT, self._uploads)
        self._asked = asked
        self._triggers = Triggers(settings.snapshot_when)
        self._snapshots = Snapshots(
            self.follower, self._rotation, settings.snapshot_limit, settings.snapshot_last_sec
        )
        self.follower.snapshots.when = _shown(settings.snapshot_when)
        # A collector before this one has seen to what came earlier.
        self._fires_from = time.monotonic_ns()
        self._next_reading = founding.origin_ns + self._seconds_done() * SECOND_NS
        self._began = time.monotonic()
        self._next_metadata = self._next_totals = 0.0
        self._late_sec = 0.0
        self._pauses = self.follower.pauses
        self._is_full = False

    def until_behind(self) -> None:
        """Go on until the session has ended, or the tables are late."""
        while not self.is_done and self._late_sec < BEHIND_SEC:
            self._once_or_wait()

    def until_caught_up(self) -> None:
        """Go on until the session has ended, or the tables are not late any more."""
        self.follower.hurries += 1
        while not self.is_done and self._late_sec > CAUGHT_UP_SEC:
            self._once_or_wait()

    def _once_or_wait(self) -> None:
        """As long as the session goes on, a full disk is waited for: journals are not read, and
        rows that could not be written are kept."""
        try:
            self._once()
        except OSError as error:
            if error.errno not in FULL or not self.follower.alive:
                raise
            if not self._is_full:
                complain(f"the disk is full, the tables wait for room: {error}")
            self._is_full = True
            time.sleep(FULL_SEC)
        else:
            self._is_full = False

    def _once(self) -> None:
        follower = self.follower
        # What a full disk had no room for comes before more is read.
        follower.tables.flush()
        follower.discover()
        # Before reading: what a producer wrote before it ended is read below.
        alive = follower.alive
        if not follower.producers:
            alive = time.monotonic() - self._began < FIRST_SEC
        waits = self._rotation.must_wait
        read = 0 if waits else follower.read()
        follower.sample()
        until = time.monotonic_ns() - MERGE_NS
        unread = follower.unread_since
        until = until if unread is None else min(until, unread)
        first = self._apply(until)
        if first is not None or not waits:
            follower.lags(0 if first is None else time.monotonic_ns() - first)
            self._late_sec = follower.last_lag_ns / 1e9
        if not self._folder.has_folder(session.JOURNAL_FOLDER):
            _end_without_journals(follower)
        self._rotation.turn(until)
        self._take_snapshots(until)
        pauses = follower.pauses
        if time.monotonic() >= self._next_metadata or pauses != self._pauses:
            self._pauses = pauses
            self._uploads.turn()
            self._rotation.remove_old()
            follower.write(ended=False)
            self._next_metadata = time.monotonic() + METADATA_SEC
            self._next_totals = time.monotonic() + TOTALS_SEC
        elif time.monotonic() >= self._next_totals:
            follower.write_totals(ended=False)
            self._next_totals = time.monotonic() + TOTALS_SEC
        if waits:
            time.sleep(PACKING_SEC)
        elif not alive and not read and self._may_end() and follower.retire():
            self.is_done = True
        elif read < BACKLOG_BYTES:
            time.sleep(POLL_SEC)

    def _apply(self, until: int) -> int | None:
        """Apply all episodes up to ``until``, and see at each whole second whether a snapshot is to
        be taken; returns the time of the first episode, None where there was none."""
        first: int | None = None
        while self._triggers.reads and self._next_reading <= until:
            now = self._next_reading
            first = _earlier(first, self.follower.apply(now))
            fired = self._triggers.read(self.follower, now, fires=now >= self._fires_from)
            self._snapshots.fire(fired, self.follower.seconds(now))
            self._next_reading += SECOND_NS
        return _earlier(first, self.follower.apply(until))

    def _take_snapshots(self, until: int) -> None:
        if self._asked.now:
            self._asked.now = False
            self._snapshots.ask()
        if self._snapshots.turn(until):
            self._next_metadata = 0.0

    def _may_end(self) -> bool:
        """Whether the session may be completed now: no snapshot is on its way, or about to be."""
        now = time.monotonic_ns()
        if self._triggers.waits_for(self.follower):
            self._snapshots.fire(self._triggers.crashes(self.follower), self.follower.seconds(now))
        return not self._snapshots.is_busy and not self._triggers.waits_for(self.follower)

    def _seconds_done(self) -> int:
        """The first whole second of the session at which nothing more than now is applied."""
        states = (producer.state for producer in self.follower.ordered())
        last = max((state.last_ns for state in states if state), default=0)
        done = max(0, last - self.follower.founding.origin_ns)
        return max(1, -(-done // SECOND_NS))


def _shown(conditions: Sequence[Condition]) -> str | None:
    return " or ".join(each.text for each in conditions) or None


def _earlier(first: int | None, second: int | None) -> int | None:
    return second if first is None else first


def _end_without_journals(follower: Follower) -> NoReturn:
    """The folder was deleted while vLLM runs: write what has come of it, and end.

    Raises:
        SessionError: always.

    """
    # The session's own folder may be gone as well.
    with contextlib.suppress(OSError):
        follower.apply()
        follower.write(ended=False)
    raise SessionError(f"{follower.journals.path} was deleted; the tables have what came before")
