# SPDX-License-Identifier: Apache-2.0
"""Which session folder does a user mean?"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from analysis.errors import SessionError, unreadable
from analysis.tables.owner import is_own
from analysis.tables.schema import TABLES
from analysis.tables.segments import has_segments
from profilemate import config
from profilemate.format.parquet import INDEX_FILE
from profilemate.format.session import JOURNAL_FOLDER, KEPT_FOLDER, METADATA_FILE
from profilemate.format.urls import is_url, url_of

_STAMP = re.compile(r"session_(\d{8}_\d{6})")
_SNAPSHOT = re.compile(r"_snapshot_\d{8}_\d{6}Z$")
_NUMBERED = re.compile(r"(session_\d{8}_\d{6}_\d+_[0-9a-f]{6})(?:_([2-9]|[1-9]\d{1,2}))?")
"""A name that profilemate made, and the number that it gave a session beside the first."""


def default_folder() -> Path:
    """Where profilemate keeps its sessions: $VLLM_PROFILING_DIR, or vllm_profiling in the
    system's temporary folder."""
    return config.read(os.environ).directory


def find_session(path: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the session that is meant.

    ``path`` is a session's folder, or a folder of sessions, of which the newest is taken, or
    None for the default folder of sessions. That is one that others may write to, too: there, the
    user's own sessions come before all others.

    Raises:
        SessionError: there is no such folder, or no session in it.

    """
    if path is not None and is_url(path):
        raise SessionError(
            f"{url_of(path)} is in object storage, and this works on a session's folder; name one"
        )
    folder = default_folder() if path is None else Path(path)
    try:
        if is_session(folder):
            return folder
        if folder.is_dir():
            return _newest_in(folder, own_first=path is None)
    except OSError as error:
        raise unreadable(folder, error) from None
    if path is None:
        raise SessionError(
            f"no session yet: {folder} does not exist; run vLLM with profilemate on PYTHONPATH, "
            "or name the session's folder"
        )
    if folder.exists():
        raise SessionError(f"{folder} is a file; name the session's folder instead")
    raise SessionError(f"there is no folder {folder}; name a session's folder or one of sessions")


def is_session(folder: Path) -> bool:
    """Whether this folder holds a session's metadata, its journal, or rows of one of its tables."""
    files = [METADATA_FILE, INDEX_FILE, *(table.file for table in TABLES.values())]
    is_any = has_journal(folder) or any((folder / file).is_file() for file in files)
    return is_any or has_segments(folder)


def has_journal(folder: Path) -> bool:
    """Whether there are journals from which ``profilemate finalize`` makes the tables."""
    return any((folder / name).is_dir() for name in (JOURNAL_FOLDER, KEPT_FOLDER))


def siblings(session: Path) -> list[Path]:
    """The sessions of the program that left this one, itself included, the first one first.

    They have one name, numbered from the second on, in one folder, and are one user's. A session
    with a name that profilemate did not make, or in a folder that cannot be listed, is alone.
    """
    folder = session.resolve()
    match = _NUMBERED.fullmatch(folder.name)
    if match is None:
        return [session]
    found = {}
    try:
        owner = folder.stat().st_uid
        for child in folder.parent.iterdir():
            other = _NUMBERED.fullmatch(child.name)
            if other is None or other[1] != match[1] or child.lstat().st_uid != owner:
                continue
            if child.is_dir() and is_session(child):
                found[int(other[2] or 1)] = child
    except OSError:
        return [session]
    found[int(match[2] or 1)] = session
    return [found[number] for number in sorted(found)]


def numbered(session_id: str) -> int:
    """Which of its program's sessions this is, from 1 on; 1 for a name that profilemate did not
    make."""
    match = _NUMBERED.fullmatch(session_id)
    return 1 if match is None else int(match[2] or 1)


def is_snapshot(name: str) -> bool:
    """Whether a session of this name is a snapshot, by profilemate's way to name it."""
    return _SNAPSHOT.search(name) is not None


def sessions_in(folder: Path, *, own_first: bool) -> list[Path]:
    """The sessions in a folder, the newest first; the user's own before all others if wanted.

    Raises:
        OSError: it cannot be read.

    """
    sessions = [
        child
        for child in folder.iterdir()
        # What begins with a dot is being made.
        if not child.name.startswith(".") and _is_readable(child) and is_session(child)
    ]
    sessions.sort(key=_age, reverse=True)
    return sorted(sessions, key=lambda each: not is_own(each)) if own_first else sessions


def _newest_in(folder: Path, *, own_first: bool) -> Path:
    sessions = sessions_in(folder, own_first=own_first)
    if not sessions:
        raise SessionError(
            f"no session in {folder}: neither it nor a folder in it has a {METADATA_FILE} that you "
            "can read; name a session's folder or one of sessions"
        )
    return sessions[0]


def _is_readable(child: Path) -> bool:
    """Whether this is a folder, and not one of another user's that nobody else may look into."""
    return os.access(child, os.R_OK | os.X_OK) and child.is_dir()


def _age(session: Path) -> tuple[str, bool, float, str]:
    """Sorts sessions by when they began: the time in the name, else the folder's own. A snapshot
    comes before the session that it is of."""
    modified = session.stat().st_mtime
    match = _STAMP.match(session.name)
    stamp = match[1] if match else time.strftime("%Y%m%d_%H%M%S", time.localtime(modified))
    return stamp, _SNAPSHOT.search(session.name) is None, modified, session.name
