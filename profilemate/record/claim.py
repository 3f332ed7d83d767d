# SPDX-License-Identifier: Apache-2.0
"""Where does a producer write: in which session, and into which journal?

The session's name is made where vLLM is first imported, and reaches every child through the
environment. Its folder appears when a process has something to record. A second engine of the
same rank, or one that starts after the session was closed, opens a new session beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from profilemate.config import SESSION, shortened
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.session import (
    CLOSED_FILE,
    FOUNDING_FILE,
    JOURNAL_FOLDER,
    METADATA_FILE,
    Founding,
    read_founding,
)
from profilemate.record.command_line import root_argv
from profilemate.record.redact import redact

LONGEST_NAME = 200
"""Bytes of a session's name: file systems take 255, and a number may come behind it."""
LONGEST_SHOWN = 300
"""Characters of a path in a message."""


@dataclass(frozen=True)
class Place:
    """Where one producer writes."""

    directory: Path
    journal: Path
    fd: int
    founding: Founding


def ensure_name(environ: MutableMapping[str, str]) -> str:
    """The name of the session that this process belongs to; a new one if it has none yet."""
    name = environ.get(SESSION, "")
    if not is_name(name):
        stamp = time.strftime("%Y%m%d_%H%M%S")
        name = f"session_{stamp}_{os.getpid()}_{os.urandom(3).hex()}"
        environ[SESSION] = name
    return name


def is_name(text: str) -> bool:
    """Whether this is a session's name, which no path out of the folder of sessions is."""
    fits = len(text) <= LONGEST_NAME
    return fits and re.fullmatch(r"session_[\w.-]+", text, re.ASCII) is not None


Settle = Callable[[], dict[str, str]]
"""Called by the process that founds a session: what else its founding says."""


def claim(
    base: Path, name: str, producer: str, keep: str = "", settle: Settle | None = None
) -> Place:
    """Open the journal of ``producer`` in the session ``name`` under ``base``, of which so much is
    to be kept.

    Where that producer's journal exists already, or the session is closed, a new session with a
    numbered name is opened instead.

    Raises:
        SessionError: the folder cannot be made, or is not safe to write to.

    """
    try:
        make_base(base)
        with Folder.anyones(base) as sessions:
            for number in range(1, 1000):
                attempt = name if number == 1 else f"{name}_{number}"
                place = _claim_in(sessions, attempt, producer, keep, settle)
                if place is not None:
                    return place
    except OSError as error:
        reason = error.strerror or str(error)
        raise SessionError(
            f"cannot write to {shortened(str(base), LONGEST_SHOWN)}: {reason} "
            "(set VLLM_PROFILING_DIR to a folder of yours)"
        ) from None
    raise SessionError(f"{base} has a thousand sessions named {name} already")


def make_base(base: Path) -> None:
    """Make the folder that holds the sessions.

    Raises:
        OSError, SessionError: it cannot be made, or is another user's.

    """
    _make_parents(base.parent)
    try:
        base.mkdir(mode=0o700)
    except FileExistsError:
        for info in (os.lstat(base), os.stat(base)):
            if info.st_uid not in (os.geteuid(), 0):
                raise SessionError(
                    f"{base} belongs to another user (set VLLM_PROFILING_DIR to a folder of yours)"
                ) from None


def _make_parents(folder: Path) -> None:
    """Make the folders that lead there. Whatever the umask, nobody else may write to them."""
    if not folder.exists():
        _make_parents(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)


def _claim_in(
    sessions: Folder, session_id: str, producer: str, keep: str, settle: Settle | None
) -> Place | None:
    """The place in this very session, or None where it is taken or closed."""
    is_new = _make(sessions, session_id)
    with sessions.folder(session_id) as session:
        if is_new:
            session.make_folder(JOURNAL_FOLDER)
        for _ in range(200):
            if session.has(JOURNAL_FOLDER) or session.has(METADATA_FILE):
                break
            time.sleep(0.01)
        try:
            journals = session.folder(JOURNAL_FOLDER)
        except FileNotFoundError:
            return None
        with journals:
            return _join(session, journals, session_id, producer, keep, settle)


def _make(sessions: Folder, session_id: str) -> bool:
    """Make the session's folder; returns False where it is there already."""
    try:
        sessions.make_folder(session_id)
    except FileExistsError:
        return False
    return True


def _join(
    session: Folder,
    journals: Folder,
    session_id: str,
    producer: str,
    keep: str,
    settle: Settle | None,
) -> Place | None:
    """Make the producer's journal, or None where there is one or the session is closed."""
    founding = _found(journals, session_id, keep, settle)
    if founding is None or founding.host != platform.node():
        return None
    name = f"{producer}.journal"
    try:
        fd = journals.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    except (FileExistsError, FileNotFoundError):
        return None
    is_closed = journals.has(CLOSED_FILE) or not journals.has(FOUNDING_FILE)
    if is_closed or not session.holds(journals, JOURNAL_FOLDER):
        # The collector closed the session in this very moment and may not have seen us.
        journals.remove(name)
        os.close(fd)
        return None
    return Place(session.path, journals.path / name, fd, founding)


def _found(journals: Folder, session_id: str, keep: str, settle: Settle | None) -> Founding | None:
    """The session's founding, made if there is none; None where the session is closed."""
    if journals.has(CLOSED_FILE):
        return None
    if not journals.has(FOUNDING_FILE):
        founding = {
            "session_id": session_id,
            "host": platform.node(),
            "origin_ns": time.monotonic_ns(),
            "started_at": time.time(),
            "key": os.urandom(32).hex(),
            "argv": redact(root_argv(session_id)),
            "keep": keep,
            **(settle() if settle is not None else {}),
        }
        try:
            journals.write(FOUNDING_FILE, json.dumps(founding).encode(), replace=False)
        except FileNotFoundError:
            # The session was completed in this very moment.
            return None
    return read_founding(journals)
