# SPDX-License-Identifier: Apache-2.0
"""Complete a session whose collector died, never started, or could not finish."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from profilemate.collector import gpu_memory, leftovers, segments
from profilemate.collector.follower import Follower
from profilemate.collector.lock import Lock
from profilemate.collector.log import complain
from profilemate.collector.tables import COLUMNS, cut_torn_row, whole_rows
from profilemate.format.errors import SessionError
from profilemate.format.files import FULL
from profilemate.format.folder import Folder
from profilemate.format.session import JOURNAL_FOLDER, KEPT_FOLDER, METADATA_FILE

WAIT_SEC = 10.0
"""How long to wait for a collector that is finishing."""

Progress = Callable[[int, int], None]


def complete(path: Path, *, wait: bool, progress: Progress | None = None) -> bool:
    """Make all tables anew from the journals, beside the old ones, then put them in their place.

    Returns False where a process of the session, or its collector, is still at work.

    Raises:
        SessionError: the session cannot be read or written, is another user's, or its tables have
            more than its journals.

    """
    try:
        with Folder.own(path) as session:
            name = _journals_of(session)
            is_ended = name is None or _complete_from(session, name, wait, progress)
            if is_ended:
                leftovers.clear(session, locked=False)
            return is_ended
    except OSError as error:
        if error.errno in FULL and _is_running(path):
            complain(f"no collector is at work, and the disk is full ({error.strerror})")
            return False
        where = f": {error.filename}" if error.filename else ""
        raise SessionError(f"cannot complete {path}: {error.strerror or error}{where}") from None


def _is_running(path: Path) -> bool:
    """Whether a process of the session may still write. Nothing is written."""
    with contextlib.suppress(OSError, SessionError), Folder.own(path) as session:
        follower = Follower(session, session)
        follower.discover()
        while follower.read():
            for producer in follower.ordered():
                producer.episodes.clear()
        return follower.alive
    return False


def _journals_of(session: Folder) -> str | None:
    """The name of the folder with the journals; None where they are gone."""
    names = (JOURNAL_FOLDER, KEPT_FOLDER)
    return next((name for name in names if session.has_folder(name)), None)


def _complete_from(session: Folder, name: str, wait: bool, progress: Progress | None) -> bool:
    try:
        journals = session.folder(name)
    except FileNotFoundError:
        return True
    with journals, Lock(journals) as lock:
        deadline = time.monotonic() + (WAIT_SEC if wait else 0)
        while not lock.acquire():
            if time.monotonic() >= deadline or not session.holds(journals, name):
                return not session.holds(journals, name)
            time.sleep(0.1)
        if not session.holds(journals, name):
            # Who had the lock before has completed the session.
            return True
        leftovers.clear(session, locked=True)
        if _is_complete(session):
            # Its collector was killed when it had only the journals to remove.
            leftovers.remove_journals(session, journals, name)
            return True
        return _complete(session, journals, name, progress)


def _is_complete(session: Folder) -> bool:
    try:
        return json.loads(session.read(METADATA_FILE))["complete"] is True
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _complete(session: Folder, journals: Folder, name: str, progress: Progress | None) -> bool:
    scratch_name = leftovers.scratch_name()
    try:
        session.make_folder(scratch_name)
        with session.folder(scratch_name) as scratch:
            follower = Follower(session, scratch, journals=journals)
            follower.resume()
            if not _read_all(follower, progress):
                return False
            shorter = _shorter(session, scratch)
            if shorter is None:
                follower.segments.clear()
                _put_in_place(scratch, session)
    finally:
        with contextlib.suppress(OSError, SessionError):
            session.remove_folder(scratch_name)
    if follower.is_damaged:
        leftovers.keep_journals(session, journals, name)
    elif shorter is None:
        leftovers.remove_journals(session, journals, name)
        follower.segments.forget_state()
    if shorter is not None:
        raise SessionError(f"{session.path} stays as it is: its journals have less, {shorter}")
    return True


def _read_all(follower: Follower, progress: Progress | None) -> bool:
    """Apply all journals; returns False where a process may still write one."""
    follower.discover()
    if not follower.producers:
        raise SessionError(
            f"{follower.journals.path} has no journal in it to complete the tables from; they stay "
            "as they are"
        )
    total = follower.size
    while follower.read():
        if any(producer.exhausted and producer.alive for producer in follower.ordered()):
            return False
        follower.apply(follower.unread_since)
        follower.tables.flush()
        if progress is not None:
            progress(follower.position, total)
    if follower.alive or not follower.retire():
        return False
    follower.close()
    return True


def _shorter(session: Folder, scratch: Folder) -> str | None:
    """Which table would lose whole rows, and how many it has; None where none would."""
    for table in COLUMNS:
        before = whole_rows(session, table) + segments.rows_being_closed(session, table)
        after = whole_rows(scratch, table)
        if before > after and table != gpu_memory.TABLE:
            return f"{after:,} of the {before:,} rows of {table}"
    return None


def _put_in_place(scratch: Folder, session: Folder) -> None:
    for table in COLUMNS:
        # The samples are in no journal: the collector that followed took them.
        if table == gpu_memory.TABLE:
            cut_torn_row(session, table)
        elif not scratch.has(table):
            session.remove(table)
    # metadata.json says that the tables are complete, so it comes last.
    for name in sorted(scratch.names(), key=lambda name: name == METADATA_FILE):
        scratch.rename(name, name, session)
