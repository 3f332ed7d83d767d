# SPDX-License-Identifier: Apache-2.0
"""How much of a journal has no collector removed yet, and what is done about it?

A collector that was killed is started again, and a disk is not filled with what nobody reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from profilemate.format import journal
from profilemate.format.journal import parse_name
from profilemate.format.keep import Keep
from profilemate.format.session import LOCK_FILE

MOST_FILES = 16
"""A collector that works leaves less. Where a file system has no locks, more of them say that
there is none."""

OF_KEPT = 4
"""The journals of one process take this part of what is kept, at most."""

LEAST_BYTES = 4 * journal.FILE_BYTES
"""However little is kept, they take so much. A file goes only once it is full and a later one has
been read, so a collector that works leaves almost as much."""

LOOK_NS = 1_000_000_000
"""How often the thread that writes looks, as long as it has something to write."""

RESTART_SEC = 10.0
"""Between two attempts to start one. Where they end at once, twice as long each time."""

LONGEST_SEC = 320.0
"""Between two attempts at most."""


class Backlog:
    """What waits of one journal, whose first file is ``journal``.

    ``start`` starts a collector, which ends at once where there is one. ``keep`` is how much of the
    session is to be kept.
    """

    def __init__(self, journal: Path, start: Callable[[], None], keep: Keep) -> None:
        self._journal = journal
        self._start = start
        self._keep = keep
        self._next_start = 0.0
        self._pause_sec = RESTART_SEC

    def look(self) -> str:
        """Look how many files there are; returns why no more is to be written, else nothing."""
        producer = self._journal.stem
        sizes = []
        with contextlib.suppress(OSError), os.scandir(self._journal.parent) as entries:
            for entry in entries:
                name = parse_name(entry.name)
                if name is not None and name[0] == producer:
                    sizes.append(entry.stat().st_size)
        # The first file stays, and is empty once it has been read.
        waiting = len(list(filter(None, sizes)))
        most = self._keep.most_bytes
        if most is not None and sum(sizes) > max(LEAST_BYTES, most / OF_KEPT):
            return f"no collector has read its last {sum(sizes) >> 20:,} MiB"
        is_alone = _is_free(self._journal.with_name(LOCK_FILE)) or waiting > MOST_FILES
        if time.monotonic() > self._next_start:
            if is_alone:
                self._next_start = time.monotonic() + self._pause_sec
                self._pause_sec = min(2 * self._pause_sec, LONGEST_SEC)
                self._start()
            else:
                self._pause_sec = RESTART_SEC
        return ""


def _is_free(lock: Path) -> bool:
    """Whether no collector holds its lock. One that tries to in this very moment gives up, and the
    next look finds none."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
