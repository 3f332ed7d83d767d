# SPDX-License-Identifier: Apache-2.0
"""Where does a producer write: in which session, and into which journal?

The session's name is made where vLLM is first imported, and reaches every child through the
environment. Its folder appears when a process has something to record. A second engine of the
same rank, or one that starts after the session was closed, opens a new session beside it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from profilemate.config import SESSION
from profilemate.format.errors import SessionError
from profilemate.format.files import write_atomically
from profilemate.format.session import (
    CLOSED_FILE,
    FOUNDING_FILE,
    JOURNAL_FOLDER,
    METADATA_FILE,
    Founding,
    read_founding,
)
from profilemate.messages import shortened
from profilemate.record.command_line import root_argv
from profilemate.record.redact import redact

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
    return re.fullmatch(r"session_[\w.-]{1,100}", text, re.ASCII) is not None


def claim(base: Path, name: str, producer: str) -> Place:
    """Open the journal of ``producer`` in the session ``name`` under ``base``.

    Where that producer's journal exists already, or the session is closed, a new session with a
    numbered name is opened instead.

    Raises:
        SessionError: the folder cannot be made, or is not safe to write to.

    """
    try:
        make_base(base)
        for number in range(1, 1000):
            attempt = name if number == 1 else f"{name}_{number}"
            place = _claim_in(base / attempt, attempt, producer)
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
    base.parent.mkdir(parents=True, exist_ok=True)
    try:
        base.mkdir(mode=0o700)
    except FileExistsError:
        for info in (os.lstat(base), os.stat(base)):
            if info.st_uid not in (os.geteuid(), 0):
                raise SessionError(
                    f"{base} belongs to another user (set VLLM_PROFILING_DIR to a folder of yours)"
                ) from None


def _claim_in(directory: Path, session_id: str, producer: str) -> Place | None:
    """The place in this very directory, or None where it is taken or closed."""
    journals = directory / JOURNAL_FOLDER
    try:
        directory.mkdir(mode=0o700)
        journals.mkdir(mode=0o700)
    except FileExistsError:
        info = os.lstat(directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise SessionError(f"{directory} is not a folder of yours") from None
    for _ in range(200):
        if journals.is_dir() or (directory / METADATA_FILE).exists():
            break
        time.sleep(0.01)
    founding = _found(journals, session_id)
    if founding is None or founding.host != platform.node():
        return None
    path = journals / f"{producer}.journal"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except (FileExistsError, FileNotFoundError):
        return None
    if not (journals / FOUNDING_FILE).exists():
        # The collector closed the session in this very moment and may not have seen us.
        path.unlink(missing_ok=True)
        os.close(fd)
        return None
    return Place(directory, path, fd, founding)


def _found(journals: Path, session_id: str) -> Founding | None:
    """The session's founding, made if there is none; None where the session is closed."""
    path = journals / FOUNDING_FILE
    if not journals.is_dir() or (journals / CLOSED_FILE).exists():
        return None
    if not path.exists():
        founding = {
            "session_id": session_id,
            "host": platform.node(),
            "origin_ns": time.monotonic_ns(),
            "started_at": time.time(),
            "key": os.urandom(32).hex(),
            "argv": redact(root_argv(session_id)),
        }
        write_atomically(path, json.dumps(founding).encode(), replace=False)
    return read_founding(journals)
