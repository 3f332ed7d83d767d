# SPDX-License-Identifier: Apache-2.0
"""Have the session sent to object storage, where VLLM_PROFILING_UPLOAD asks for it.

A process of its own sends it. What that says is in upload.json; nothing here waits for it.
"""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from profilemate.collector.log import complain
from profilemate.format.folder import Folder
from profilemate.format.upload import MISSING, UPLOAD_FILE, uploader

FIRST_WAIT_SEC = 10.0
LONGEST_WAIT_SEC = 320.0
"""Between two starts of an uploader that ended; twice as long each time."""
MOST_BYTES = 1 << 16


class Uploads:
    """Sends to ``url``; nowhere where that is empty. ``dropped``: segments that were removed before
    they were there."""

    def __init__(self, url: str, session: Folder) -> None:
        self.dropped = 0
        self._url = url
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0.0
        self._wait = FIRST_WAIT_SEC
        self._is_given_up = not url

    def turn(self) -> None:
        """Start the uploader, or start it again."""
        if self._is_given_up or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None and self._process.returncode == MISSING:
            self._is_given_up = True
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._wait
            self._wait = min(2 * self._wait, LONGEST_WAIT_SEC)
            self._start()

    @property
    def is_wanted(self) -> bool:
        return bool(self._url)

    @property
    def confirmed(self) -> int:
        """The number of the last segment up to which all are in the store."""
        segments = self._said().get("segments")
        return segments if type(segments) is int else 0

    def state(self) -> dict[str, Any] | None:
        """As in metadata.json; None where nothing was asked for."""
        if not self._url:
            return None
        problem = self._said().get("problem")
        return {
            "url": f"{self._url}/{self._session.name}",
            "segments": self.confirmed,
            "dropped": self.dropped,
            "problem": problem if isinstance(problem, str) else None,
        }

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                uploader(str(self._session.path.absolute()), self._url),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            complain(f"no upload: {error.strerror}; the session is recorded")

    def _said(self) -> dict[str, Any]:
        try:
            info = self._session.stat(UPLOAD_FILE)
            if info is None or info.st_size > MOST_BYTES:
                return {}
            found = json.loads(self._session.read(UPLOAD_FILE))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}
