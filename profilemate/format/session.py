# SPDX-License-Identifier: Apache-2.0
"""What both ends know of a session's folder: its files, who founded it, whether it is closed.

A session is one vLLM deployment. Its first process founds it; the collector closes it once every
process has gone, and a process that starts later opens a session of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder

JOURNAL_FOLDER = "journal"
KEPT_FOLDER = "journal-kept"
"""The journal folder's name once the session has ended, where not all of it could be read."""
FOUNDING_FILE = "session.json"
CLOSED_FILE = "closed.json"
"""The founding file's name from the moment that no process may join any more."""
LOCK_FILE = "collector.lock"
"""Locked by the session's collector as long as it works."""
METADATA_FILE = "metadata.json"
SEGMENTS_FOLDER = "segments"
"""What earlier parts of the tables are closed in."""


@dataclass(frozen=True)
class Founding:
    """What the first process of a session settles for all others."""

    session_id: str
    host: str
    origin_ns: int
    """Monotonic clock at second 0 of the session, in nanoseconds."""
    started_at: float
    """Wall clock at second 0, in seconds since 1970."""
    key: bytes
    """The secret behind content and prefix ids; removed when the tables are complete."""
    argv: list[str]
    keep: str = ""
    """VLLM_PROFILING_KEEP: how much of the tables is kept."""
    contents: bytes = b""
    """Behind ids that several sessions have in common, made of the user's secret; removed as
    ``key`` is. Empty: the ids are the session's own."""
    contents_apart: str = ""
    """Why the user's secret could not be used; empty where it could, or there is none."""


def read_founding(journals: Folder) -> Founding:
    """Read what the session's first process settled.

    Raises:
        SessionError: the file is missing or damaged.

    """
    name = CLOSED_FILE if journals.has(CLOSED_FILE) else FOUNDING_FILE
    try:
        founding = json.loads(journals.read(name))
        secrets = {
            name: bytes.fromhex(founding[name]) for name in ("key", "contents") if name in founding
        }
        return Founding(**{**founding, **secrets})
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SessionError(f"{journals.path / name} cannot be read: {reason}") from None


def close_to_newcomers(journals: Folder) -> None:
    """Close the session: a process that starts later opens one of its own."""
    if not journals.has(CLOSED_FILE):
        journals.rename(FOUNDING_FILE, CLOSED_FILE)


def reopen(journals: Folder) -> None:
    """Undo ``close_to_newcomers``, for a process that came just before it."""
    journals.rename(CLOSED_FILE, FOUNDING_FILE)
