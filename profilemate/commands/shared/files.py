# SPDX-License-Identifier: Apache-2.0
"""Write what a command made into a file: whole or not at all, and only where a file belongs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from analysis.errors import SessionError
from profilemate.format.files import opened_atomically
from profilemate.format.parquet import INDEX_FILE, TEXTS_FILE, table_file
from profilemate.format.session import (
    CLOSED_FILE,
    FOUNDING_FILE,
    JOURNAL_FOLDER,
    KEPT_FOLDER,
    METADATA_FILE,
    SEGMENTS_FOLDER,
)

LONGEST_NAME = 239
"""Bytes of a file's name: file systems take 255, and ``opened_atomically`` adds the rest."""


def write(target: Path, text: str) -> None:
    """Write the text to what ``writable`` gave, in place of a file that is there.

    Raises:
        SessionError: the file cannot be written.

    """
    with written(target) as file:
        file.write(text.encode())


@contextmanager
def written(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of what ``writable`` gave once the block has ended.

    Raises:
        SessionError: the file cannot be written.

    """
    try:
        with opened_atomically(target) as file:
            yield file
    except OSError as error:
        raise _refused(target, error.strerror or str(error)) from None


def writable(path: Path, option: str) -> Path:
    """The file that the path leads to through symbolic links, whether it exists or not.

    Args:
        path: what the user named.
        option: the option that names another file.

    Raises:
        SessionError: no file can be made there, or what is there must not be replaced.

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
        return "it goes to a file, not to stdout"
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
        return f"its name has {length} bytes, and at most {LONGEST_NAME} can be written"
    if _is_record(target):
        return "the session keeps its own record there"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}"
    return None


def _is_record(target: Path) -> bool:
    """Whether the file is, or would be, one of a session's own."""
    from analysis.tables.find import is_session
    from analysis.tables.schema import TABLES
    from analysis.tables.segments import has_segments
    from profilemate.collector.metadata import SUMMARY_FILE
    from profilemate.format.totals import TOTALS_FILE

    folder = target.parent
    if any(
        above.name == SEGMENTS_FOLDER and has_segments(above.parent)
        for above in (folder, folder.parent)
    ):
        return True
    if folder.name in (JOURNAL_FOLDER, KEPT_FOLDER):
        return any((folder / file).exists() for file in (FOUNDING_FILE, CLOSED_FILE))
    tables = {table.file for table in TABLES.values()}
    tables |= {table_file(name) for name in TABLES} | {INDEX_FILE, TEXTS_FILE}
    records = {METADATA_FILE, SUMMARY_FILE, TOTALS_FILE, JOURNAL_FOLDER, KEPT_FOLDER} | tables
    return target.name in records and is_session(folder)


def _mode(path: Path) -> int | None:
    """What is behind the path and its symbolic links; None where there is nothing yet."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _refused(path: Path, reason: str) -> SessionError:
    return SessionError(f"cannot write {path}: {reason}")
