# SPDX-License-Identifier: Apache-2.0
"""One collector a session: elected by a file lock, or by who made the file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from profilemate.format import processes
from profilemate.format.folder import Folder
from profilemate.format.session import LOCK_FILE

_HOLDER_FILE = "collector.pid"

WRITING_SEC = 10.0
"""Who made a holder's file has its number in it by then, or is dead."""


class Lock:
    """The right to write a session's tables, held until the ``with`` block ends."""

    def __init__(self, journals: Folder) -> None:
        self._journals = journals
        self._fd = -1

    def acquire(self) -> bool:
        """Try to take the lock, without waiting.

        Raises:
            OSError: the folder cannot be written.

        """
        try:
            fd = self._journals.open(LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            return self._acquire_without_locks()
        self._fd = fd
        return True

    def _acquire_without_locks(self) -> bool:
        """On a file system without locks: who makes the file has it, for as long as it lives."""
        try:
            fd = self._journals.open(_HOLDER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            if self._has_holder():
                return False
            self._journals.remove(_HOLDER_FILE)
            return self._acquire_without_locks()
        os.write(fd, f"{os.getpid()} {processes.start_of(os.getpid())}".encode())
        self._fd = fd
        return True

    def _has_holder(self) -> bool:
        """Whether who made the holder's file lives, or may be about to write its number there."""
        with contextlib.suppress(FileNotFoundError):
            pid, _, start = self._journals.read(_HOLDER_FILE).decode().partition(" ")
            if pid.isdigit():
                return processes.is_alive(int(pid), start)
        made = self._journals.stat(_HOLDER_FILE)
        return made is not None and time.time() - made.st_mtime < WRITING_SEC

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
