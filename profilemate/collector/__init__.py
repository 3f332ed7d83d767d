# SPDX-License-Identifier: Apache-2.0
"""From journals to tables, while vLLM runs or afterwards."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from profilemate.format.errors import SessionError
from profilemate.format.session import JOURNAL_FOLDER, KEPT_FOLDER, METADATA_FILE


def complete_if_ended(folder: Path) -> bool:
    """Complete the tables from the journals if every process of the session has ended.

    Returns True if the session is complete now or was before, False if it still runs: a process
    may write, or its collector is at work.

    Raises:
        SessionError: the folder cannot be read or written.

    """
    if not (folder / JOURNAL_FOLDER).is_dir():
        return True
    from profilemate.collector import completing

    return completing.complete(folder, wait=False)


def finalize(folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Complete the tables from the journals; does nothing to a session that is complete.

    ``progress`` is called with the journal bytes read so far and in all.

    Raises:
        SessionError: it still runs, is not a session, is another user's, or cannot be read or
            written.

    """
    journals = (folder / JOURNAL_FOLDER, folder / KEPT_FOLDER)
    if not any(journal.is_dir() for journal in journals) and not _is_session(folder):
        raise SessionError(f"{folder} is not a session: it has no {METADATA_FILE}")
    from profilemate.collector import completing

    if not completing.complete(folder, wait=True, progress=progress):
        raise SessionError(
            f"{folder} is still being written: stop vLLM first, or analyze it as it is"
        )


def clear(folder: Path) -> None:
    """Remove what killed processes left behind in a session whose journals are gone."""
    from profilemate.collector import leftovers
    from profilemate.format.folder import Folder

    with contextlib.suppress(OSError, SessionError), Folder.own(folder) as session:
        leftovers.clear(session, locked=False)


def _is_session(folder: Path) -> bool:
    try:
        return "format_version" in json.loads((folder / METADATA_FILE).read_bytes())
    except (OSError, ValueError):
        return False
