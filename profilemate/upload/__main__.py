# SPDX-License-Identifier: Apache-2.0
"""The uploader's process; ``profilemate.format.upload`` has its command line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.session import JOURNAL_FOLDER
from profilemate.format.upload import LOCK_FILE, MISSING
from profilemate.upload.progress import Progress

_NICE = 10


def main(arguments: list[str]) -> int:
    """Upload the session to its end; returns the exit code."""
    path, url = arguments
    try:
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        with Folder.own(Path(path)) as session, session.folder(JOURNAL_FOLDER) as journals:
            lock = journals.open(LOCK_FILE, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return 0  # Another one does it already.
            return _upload(session, url)
    except (SessionError, OSError) as error:
        print(f"upload: {error}", file=sys.stderr, flush=True)
        return 2


def _upload(session: Folder, url: str) -> int:
    progress = Progress(session)
    if find_spec("obstore") is None:
        progress.failed(f"obstore is not installed for {sys.executable}: pip install obstore")
        return MISSING
    from profilemate.upload.sending import Sender, upload

    return upload(Sender(session, f"{url}/{session.name}", progress), progress)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
