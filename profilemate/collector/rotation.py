# SPDX-License-Identifier: Apache-2.0
"""When does a segment of the tables end, and which ones are kept?"""

from __future__ import annotations

import contextlib
import math
import os
import time

from profilemate.collector.follower import Follower
from profilemate.collector.uploads import Uploads
from profilemate.format.keep import OF_FREE, Keep

SEGMENT_BYTES = 64 << 20
"""A segment ends when its tables have so many bytes, before they are compressed."""

SEGMENTS_KEPT = 8
"""Where less than this many segments of that size may be kept, they are smaller."""

LEAST_BYTES = 1 << 20

SEGMENT_SEC = 3600.0
"""A segment ends after so long, if anything is in it."""

JOURNAL_BYTES = 4 << 20
"""A segment ends when so much has been read of the journals, which a collector that dies has to
read again."""

LOOK_SEC = 0.5
"""How often the size of the session is measured, where tables do not grow fast."""

LOOKS = 16
"""The size is measured so often while the open tables grow by a segment."""

WAITING = 2
"""Segments that wait to be uploaded are kept up to so many times what is to be kept."""

RETRY_SEC = 10.0
"""How long to wait where a segment could not be closed."""


class Rotation:
    """Ends segments, and removes the oldest ones beyond what is to be kept.

    While it ``is_held``, none is removed.
    """

    def __init__(self, follower: Follower, keep: Keep, uploads: Uploads | None = None) -> None:
        self._uploads = uploads if uploads is not None and uploads.is_wanted else None
        self._follower = follower
        self._segments = follower.segments
        self._keep = keep
        self._began = time.monotonic()
        self._read_before = follower.position
        self._next_try = 0.0
        self._next_look = 0.0
        self._rows_before = 0
        self._most = self._most_bytes(0)
        self.is_held = False

    @property
    def must_wait(self) -> bool:
        """Whether no more may be read of the journals, as the open segment is full and the one
        before it is still being packed. Of journals there are ten times fewer bytes than of rows,
        so what waits, waits there. Nothing waits for a segment that cannot be closed."""
        segments = self._segments
        return (
            self._most < math.inf
            and segments.is_closing
            and segments.problem is None
            and self._is_full
        )

    def turn(self, applied_ns: int) -> None:
        """Do what is due. All episodes up to ``applied_ns`` have been applied, and no later one.

        It is 0 where nothing is known of some journal yet.

        Raises:
            OSError: the folder is gone.

        """
        segments, now = self._segments, time.monotonic()
        has_closed = segments.poll()
        if has_closed:
            self._follower.drop_read_journals()
        if has_closed or self._may_be_over(now):
            self.remove_old()
        if now < self._next_try:
            return
        if segments.problem is not None:
            self._next_try = now + RETRY_SEC
            segments.retry()
        elif (
            applied_ns
            and not segments.is_closing
            and self._is_due(now)
            and self._follower.can_be_saved
        ):
            with contextlib.suppress(OSError):
                self.cut(applied_ns)

    def cut(self, applied_ns: int) -> None:
        """End the open segment here.

        Raises:
            OSError: that cannot be done now.

        """
        now = time.monotonic()
        try:
            self._follower.cut(applied_ns)
        except OSError:
            self._next_try = now + RETRY_SEC
            raise
        self._began, self._read_before = now, self._follower.position

    def remove_old(self) -> None:
        """Remove the oldest segments beyond what is to be kept. The last one always stays: it has
        the state from which everything goes on."""
        segments, keep = self._segments, self._keep
        self._next_look = time.monotonic() + LOOK_SEC
        self._rows_before = self._follower.tables.bytes_written
        size = self._follower.session_size() if keep.most_bytes is not None or keep.of_free else 0
        self._most = self._most_bytes(size)
        if self.is_held:
            return
        confirmed = math.inf if self._uploads is None else self._uploads.confirmed
        while len(segments.closed) > 1:
            first = segments.closed[0]
            # What is not in the store yet may take as much again.
            factor = 1 if first.number <= confirmed else WAITING
            oldest = -1.0
            if keep.most_sec is not None:
                oldest = self._follower.seconds(time.monotonic_ns()) - factor * keep.most_sec
            if first.end_sec >= oldest and size <= factor * self._most:
                break
            size -= first.size
            if self._uploads is not None:
                self._uploads.dropped += first.number > confirmed
            segments.remove_first()

    def _may_be_over(self, now: float) -> bool:
        """Whether the session may have grown by more than may go unnoticed."""
        rows = self._follower.tables.bytes_written - self._rows_before
        return now >= self._next_look or rows >= self._segment_bytes / LOOKS or self.must_wait

    def _is_due(self, now: float) -> bool:
        tables = self._follower.tables
        if not tables.open_bytes or self._segments.is_closing or not self._follower.can_be_saved:
            return False
        return (
            now - self._began >= SEGMENT_SEC
            or self._follower.position - self._read_before >= JOURNAL_BYTES
            or self._is_full
        )

    @property
    def _is_full(self) -> bool:
        return self._follower.tables.open_bytes >= self._segment_bytes

    @property
    def _segment_bytes(self) -> float:
        """Of the tables of a segment, before they are packed."""
        return max(LEAST_BYTES, min(SEGMENT_BYTES, self._most / SEGMENTS_KEPT))

    def _most_bytes(self, size: int) -> float:
        """What the session may take. ``size``: what it takes now."""
        most = math.inf if self._keep.most_bytes is None else self._keep.most_bytes
        if self._keep.of_free:
            disk = os.fstatvfs(self._follower.folder.fd)
            most = min(most, (disk.f_bavail * disk.f_frsize + size) / OF_FREE)
        return most
