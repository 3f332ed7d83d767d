# SPDX-License-Identifier: Apache-2.0
"""Which processes live? A journal names its writer by what this module knows of it."""

from __future__ import annotations

import os
from pathlib import Path


def start_of(pid: int) -> str:
    """When the process started, which no later process with the same id shares; empty where
    unknown."""
    try:
        return _fields(pid)[19]
    except (OSError, IndexError):
        return ""


def is_alive(pid: int, start: str) -> bool:
    """Whether the process that started then still runs, and is no zombie."""
    if not start:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    try:
        fields = _fields(pid)
    except OSError:
        return False
    return fields[0] not in "ZX" and fields[19] == start


def parent_of(pid: int) -> int:
    """The id of the process's parent.

    Raises:
        OSError: there is no such process, or the system does not say.

    """
    return int(_fields(pid)[1])


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the command's name may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
