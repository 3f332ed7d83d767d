# SPDX-License-Identifier: Apache-2.0
"""A session that is being recorded, to ask something of who records it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from analysis.errors import SessionError, unreadable
from analysis.tables.owner import another
from profilemate.format.folder import Folder
from profilemate.format.session import CLOSED_FILE, JOURNAL_FOLDER


@contextmanager
def journals_of_running(session: Path) -> Iterator[Folder]:
    """The folder of the journals of a session that runs and is the user's own.

    Raises:
        SessionError: it has ended, is another user's, or its folder cannot be used.

    """
    owner = another(session)
    if owner is not None:
        raise SessionError(f"{session} belongs to {owner}; run this as that user")
    try:
        # No link to a session's folder is followed.
        with Folder.own(Path(os.path.realpath(session))) as own:
            if not own.has_folder(JOURNAL_FOLDER):
                raise SessionError(f"{session} has ended: nothing records it any more")
            with own.folder(JOURNAL_FOLDER) as journals:
                if journals.has(CLOSED_FILE):
                    raise SessionError(f"{session} has ended: nothing records it any more")
                yield journals
    except OSError as error:
        raise unreadable(session, error) from None
