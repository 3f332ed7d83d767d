# SPDX-License-Identifier: Apache-2.0
"""Write what a verb made into a file: whole, or not at all, and into nothing but a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from analysis.errors import SessionError
from profilemate.format.files import write_atomically
from profilemate.format.session import CLOSED_FILE, FOUNDING_FILE

LONGEST_NAME = 239
"""Bytes of a file's name: 255 is what file systems take, less what ``write_atomically`` adds."""


def write(target: Path, text: str) -> None:
    """Write the text to what ``writable`` gave; a file that is there already is replaced.

    Raises:
        SessionError: it cannot be written.

    """
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        raise _refused(target, error.strerror or str(error)) from None


def writable(path: Path, option: str) -> Path:
    """The file, there or not yet, that the path leads to through symbolic links.

    Args:
        path: what the user named.
        option: how another one is named.

    Raises:
        SessionError: no file can be made there, or it is none to be replaced.

    """
    target = Path(os.path.realpath(path))
    try:
        reason = _reason_against(path, target)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise _refused(path, f"{reason}; name another file with {option}")
    return target


def _reason_against(path: Path, target: Path) -> str | None:
    if str(path) == "-":
        return "it would go to a file of that name, and not to stdout"
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        return "it is a folder"
    if mode is not None and not stat.S_ISREG(mode):
        return "it is a device or a pipe"
    folder = target.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    length = len(os.fsencode(target.name))
    if length > LONGEST_NAME:
        return f"its name has {length} bytes, and {LONGEST_NAME} can be written"
    if _is_record(target):
        return "a session's record goes there"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}"
    return None


def _is_record(target: Path) -> bool:
    """Whether a session keeps something of its own there, or would."""
    from analysis.tables.find import JOURNAL, METADATA, is_session
    from analysis.tables.schema import TABLES
    from profilemate.collector.metadata import SUMMARY_FILE

    folder = target.parent
    if folder.name == JOURNAL:
        return any((folder / file).exists() for file in (FOUNDING_FILE, CLOSED_FILE))
    records = {METADATA, SUMMARY_FILE, JOURNAL, *(table.file for table in TABLES.values())}
    return target.name in records and is_session(folder)


def _mode(path: Path) -> int | None:
    """What is there, behind symbolic links; None where nothing is yet."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _refused(path: Path, reason: str) -> SessionError:
    return SessionError(f"cannot write {path}: {reason}")
