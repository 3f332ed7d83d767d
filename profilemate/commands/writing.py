# SPDX-License-Identifier: Apache-2.0
"""Write what a verb made into a file: whole, or not at all, and into nothing but a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from analysis.errors import SessionError
from analysis.find import JOURNAL, METADATA, is_session
from analysis.tables import TABLES
from profilemate.collector.metadata import SUMMARY_FILE
from profilemate.session import write_atomically

_OF_A_SESSION = {METADATA, SUMMARY_FILE, JOURNAL, *(table.file for table in TABLES.values())}


def write(path: Path, text: str) -> None:
    """Write the text; a file that is there already is replaced.

    Raises:
        SessionError: it cannot be written.

    """
    target = writable(path)
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None


def writable(path: Path) -> Path:
    """The file, there or not yet, that the path leads to through symbolic links.

    Raises:
        SessionError: no file can be made there, or it is none to be replaced.

    """
    try:
        reason = _reason_against(path)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise _refused(path, reason)
    return _target(path)


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _reason_against(path: Path) -> str | None:
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        return "it is a folder; name a file in it with -o"
    if mode is not None and not stat.S_ISREG(mode):
        return "it is a device or a pipe; name a file"
    target = _target(path)
    folder = target.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if (target.name in _OF_A_SESSION and is_session(folder)) or folder.name == JOURNAL:
        return "it belongs to a session's records; name another file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}; name another place with -o"
    return None


def _mode(path: Path) -> int | None:
    """What is there, behind symbolic links; None where nothing is yet."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _refused(path: Path, reason: str) -> SessionError:
    return SessionError(f"cannot write {path}: {reason}")
