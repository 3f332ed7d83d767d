# SPDX-License-Identifier: Apache-2.0
"""What both ends know of a session's folder: its files, who founded it, whether it is closed.

A session is one vLLM deployment. Its first process founds it; the collector closes it once every
process has gone, and a process that starts later opens a session of its own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from profilemate.format.errors import SessionError

JOURNAL_FOLDER = "journal"
FOUNDING_FILE = "session.json"
CLOSED_FILE = "closed.json"
"""The founding file's name from the moment that no process may join any more."""
METADATA_FILE = "metadata.json"


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


def read_founding(journals: Path) -> Founding:
    """Read what the session's first process settled.

    Raises:
        SessionError: the file is missing or damaged.

    """
    closed = journals / CLOSED_FILE
    path = closed if closed.exists() else journals / FOUNDING_FILE
    try:
        founding = json.loads(path.read_bytes())
        return Founding(**{**founding, "key": bytes.fromhex(founding["key"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SessionError(f"{path} cannot be read: {error}") from None


def close_to_newcomers(journals: Path) -> None:
    """Close the session: a process that starts later opens one of its own."""
    if not (journals / CLOSED_FILE).exists():
        os.rename(journals / FOUNDING_FILE, journals / CLOSED_FILE)


def reopen(journals: Path) -> None:
    """Undo ``close_to_newcomers``, for a process that came just before it."""
    os.rename(journals / CLOSED_FILE, journals / FOUNDING_FILE)
