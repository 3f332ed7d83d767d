# SPDX-License-Identifier: Apache-2.0
"""Which sessions are to be shown?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from analysis.errors import SessionError, unreadable
from analysis.tables.find import default_folder, find_session, is_session, sessions_in
from profilemate.format.session import CLOSED_FILE, JOURNAL_FOLDER
from profilemate.live.reading import NoTotalsError, look
from profilemate.live.watching import SILENT_SEC

_BEGINS_SEC = 60.0
"""A session without totals.json may still get one for so long after its folder was made."""


def sessions_of(paths: Sequence[Path]) -> list[Path]:
    """The sessions that are meant: those named, and of a folder of sessions the newest that runs,
    else the newest. Without a name: the newest of the default folder that runs.

    Raises:
        SessionError: there is no such session, or none runs where none is named.

    """
    if not paths:
        # Says what is wrong where there is no folder, or no session in it.
        find_session(None)
        newest = _newest_running(default_folder(), own_first=True)
        if newest is None:
            raise SessionError(
                f"no session in {default_folder()} is running; name one to see how it ended"
            )
        return [newest]
    found = [_session_of(path) for path in paths]
    return list(dict.fromkeys(found))


def _session_of(path: Path) -> Path:
    try:
        if path.is_dir() and not is_session(path) and not (path / "totals.json").is_file():
            running = _newest_running(path, own_first=False)
            if running is not None:
                return running
    except OSError as error:
        raise unreadable(path, error) from None
    return find_session(path)


def _newest_running(folder: Path, *, own_first: bool) -> Path | None:
    try:
        sessions = sessions_in(folder, own_first=own_first)
    except OSError as error:
        raise unreadable(folder, error) from None
    return next(filter(_runs, sessions), None)


def _runs(session: Path) -> bool:
    """Whether its figures are new, or it has only just begun."""
    try:
        found = look(session)
    except NoTotalsError:
        return _has_begun(session)
    except SessionError:
        return False
    return not found.ended and time.time() - found.written_ns / 1e9 <= SILENT_SEC


def _has_begun(session: Path) -> bool:
    journals = session / JOURNAL_FOLDER
    try:
        new = time.time() - journals.stat().st_mtime < _BEGINS_SEC
        return new and not (journals / CLOSED_FILE).exists()
    except OSError:
        return False
