# SPDX-License-Identifier: Apache-2.0
"""How far an upload is: ``upload.json`` in the session's folder, which the collector reads."""

from __future__ import annotations

import contextlib
import json
import sys

from profilemate.format.folder import Folder
from profilemate.format.upload import UPLOAD_FILE


class Progress:
    """``segments``: the number of the last segment up to which all are confirmed by the store.
    ``missed``: segments that were removed before they could be sent. ``problem``: why nothing is
    sent at the moment. ``complete``: the whole session is there."""

    def __init__(self, session: Folder) -> None:
        self.segments = 0
        self.missed = 0
        self.problem: str | None = None
        self.complete = False
        self._session = session
        self._written = b""

    def failed(self, problem: str) -> None:
        """Nothing can be sent; it is said once."""
        if problem != self.problem:
            print(f"no upload: {problem}; the session is recorded", file=sys.stderr, flush=True)
        self.problem = problem
        self.write()

    def content(self) -> bytes:
        found = {
            "segments": self.segments,
            "missed": self.missed,
            "problem": self.problem,
            "complete": self.complete,
        }
        return json.dumps(found, indent=1).encode() + b"\n"

    def write(self) -> None:
        """Write it, if it has changed. A full disk, or a folder that is gone, stops nothing."""
        content = self.content()
        if content != self._written:
            with contextlib.suppress(OSError):
                self._session.write(UPLOAD_FILE, content)
                self._written = content
