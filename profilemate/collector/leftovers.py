# SPDX-License-Identifier: Apache-2.0
"""What becomes of the journals once a session has ended, and of what a killed process left behind.

The journal folder goes in one rename, so that it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re

from profilemate.collector.metadata import SUMMARY_FILE
from profilemate.collector.worker import USAGE_TABLE
from profilemate.format import processes, snapshot
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.session import KEPT_FOLDER, METADATA_FILE
from profilemate.format.totals import TOTALS_FILE
from profilemate.format.upload import UPLOAD_FILE

_SCRATCH = ".completing-"
_DONE = ".journal-done-"
_MAKING = ".making-"

_WHOLE = (METADATA_FILE, SUMMARY_FILE, USAGE_TABLE, TOTALS_FILE, UPLOAD_FILE)
_WRITTEN_WHOLE = "|".join(map(re.escape, _WHOLE))
_LEFTOVER = re.compile(
    rf"{re.escape(_SCRATCH)}(?P<maker>\d+)?.*|{re.escape(_DONE)}.*"
    rf"|\.({_WRITTEN_WHOLE})\.(?P<writer>\d+)\.[0-9a-f]+"
)


def scratch_name() -> str:
    """A name for a folder of new tables, which says whose it is."""
    return _name(_SCRATCH)


def snapshot_scratch_name(snapshot: str) -> str:
    """A name, beside the session, for the folder of a snapshot that is being made."""
    return f".{snapshot}{_MAKING}{os.urandom(3).hex()}"


def remove_journals(session: Folder, journals: Folder, name: str) -> None:
    """Remove the journal folder ``name``, all of which is in the tables. It is not there any more
    afterwards; ``clear`` removes what is left of it."""
    _check_place(session, journals, name)
    session.rename(name, _name(_DONE))


def keep_journals(session: Folder, journals: Folder, name: str) -> None:
    """Put the journal folder ``name`` aside: what of it could be read is in the tables.

    A later release may read more of it, so ``profilemate finalize`` tries again.
    """
    _check_place(session, journals, name)
    if name != KEPT_FOLDER:
        session.rename(name, KEPT_FOLDER)


def clear(session: Folder, *, locked: bool) -> None:
    """Remove what killed processes left behind.

    Who holds the session's lock is the only one at work in it. Without the lock, what belongs to a
    process that lives stays.
    """
    for name in session.names():
        match = _LEFTOVER.fullmatch(name)
        if match is None:
            continue
        pid = match["maker"] or match["writer"]
        if locked or pid is None or not processes.is_alive(int(pid), ""):
            # It is harmless where it lies, and the next one who comes tries again.
            with contextlib.suppress(OSError, SessionError):
                _remove(session, name)
    if locked:
        _clear_snapshots(session)


def _clear_snapshots(session: Folder) -> None:
    """Remove the halves of snapshots, which only its collector makes."""
    begin = re.escape(f".{snapshot.prefix_of(session.name)}")
    half = re.compile(rf"{begin}\w+{re.escape(_MAKING)}[0-9a-f]+")
    with contextlib.suppress(OSError, SessionError), session.parent() as parent:
        for entry in parent.names():
            if half.fullmatch(entry):
                with contextlib.suppress(OSError, SessionError):
                    _remove(parent, entry)


def _remove(session: Folder, name: str) -> None:
    if session.has_folder(name):
        session.remove_folder(name)
    else:
        session.remove(name)


def _check_place(session: Folder, journals: Folder, name: str) -> None:
    if not session.holds(journals, name):
        raise SessionError(f"{journals.path} was moved or deleted while its tables were made")


def _name(prefix: str) -> str:
    return f"{prefix}{os.getpid()}-{os.urandom(3).hex()}"
