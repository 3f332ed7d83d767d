# SPDX-License-Identifier: Apache-2.0
"""One collector a session: elected by a file lock, or by who made the file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from profilemate.format import processes
from profilemate.format.session import JOURNAL_FOLDER


class Lock:
    """The right to write a session's tables, held until the ``with`` block ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_FOLDER / "collector.lock"
        self._fd = -1

    def acquire(self) -> bool:
        """Try to take the lock, without waiting.

        Raises:
            OSError: the folder cannot be written.

        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
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
        path = self.path.with_suffix(".pid")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pid, _, start = path.read_text().partition(" ")
            if not pid.isdigit() or processes.is_alive(int(pid), start):
                return False
            path.unlink(missing_ok=True)
            return self._acquire_without_locks()
        os.write(fd, f"{os.getpid()} {processes.start_of(os.getpid())}".encode())
        self._fd = fd
        return True

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
