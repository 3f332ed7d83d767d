# SPDX-License-Identifier: Apache-2.0
"""What the user asks of a session that is being recorded: ``journal/control.json``.

``profilemate pause`` and ``resume`` write it, and every process that records looks at it. Without
the file nothing is asked for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from profilemate.format.folder import Folder

CONTROL_FILE = "control.json"

MAX_BYTES = 4096


def ask(journals: Folder, *, paused: bool) -> None:
    """Ask all processes of the session to pause, or to go on.

    Raises:
        OSError: the file cannot be written.

    """
    journals.write(CONTROL_FILE, json.dumps({"paused": paused}).encode())


class Asked:
    """What the session's user asks for, in the folder of its journals."""

    def __init__(self, journals: Path) -> None:
        self._path = journals / CONTROL_FILE
        self._seen: tuple[int, int, int] | None = None
        self._is_paused = False

    def is_paused(self) -> bool:
        """Whether the recording is to be paused. A file that cannot be read changes nothing."""
        try:
            info = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            self._seen, self._is_paused = None, False
            return False
        except OSError:
            return self._is_paused
        seen = (info.st_ino, info.st_mtime_ns, info.st_size)
        if seen != self._seen:
            self._seen, self._is_paused = seen, self._read()
        return self._is_paused

    def _read(self) -> bool:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                said = json.loads(os.read(fd, MAX_BYTES))
            finally:
                os.close(fd)
            return said["paused"] is True
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return self._is_paused
