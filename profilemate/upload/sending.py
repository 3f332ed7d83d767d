# SPDX-License-Identifier: Apache-2.0
"""Send what is new of a session, in an order in which a reader finds it whole at any moment.

A segment's index comes after its tables, and the session's metadata.json after everything. What the
store has is asked of the store, so an uploader that starts anew sends nothing twice but the end.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from contextlib import suppress
from typing import BinaryIO

from analysis.tables.storage import Store
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.segments import INDEX_FILE, folder_name
from profilemate.format.session import JOURNAL_FOLDER, METADATA_FILE, SEGMENTS_FOLDER
from profilemate.format.totals import TOTALS_FILE
from profilemate.format.upload import UPLOAD_FILE
from profilemate.upload.progress import Progress

POLL_SEC = 1.0
LONGEST_WAIT_SEC = 300.0
"""Between two tries where the store does not answer."""
METADATA_SEC = 60.0
ORPHANED_SEC = 900.0
"""The collector writes once a second. If it has not for so long, it is gone, and the next one
starts an uploader of its own."""

_NUMBER = re.compile(r"[0-9]{4,9}")


class Sender:
    """Sends one session to the URL of its own. ``turn`` does what is due."""

    def __init__(self, session: Folder, url: str, progress: Progress) -> None:
        self._session = session
        self._progress = progress
        self._store = Store(url)
        self._there: dict[str, int] | None = None
        self._metadata_at = 0.0
        self._segments_said = -1

    @property
    def is_orphaned(self) -> bool:
        """Whether nobody records the session any more, though it has not ended."""
        infos = (self._session.stat(name) for name in (METADATA_FILE, TOTALS_FILE))
        last = max((info.st_mtime for info in infos if info is not None), default=time.time())
        return time.time() - last > ORPHANED_SEC

    def turn(self) -> bool:
        """Send what is new; returns whether the session has ended and is all there.

        Raises:
            SessionError: the store does not take it; what was sent counts.
            OSError: the session cannot be read.

        """
        if self._there is None:
            self._there = {each.name: each.size for each in self._store.objects()}
        has_ended = self._has_ended()
        numbers = self._closed()
        for number in numbers:
            if number > self._progress.segments:
                self._segment(number)
        if not has_ended:
            self._while_it_runs()
            return False
        for name in self._session.names():
            info = self._session.stat(name)
            if info is not None and self._is_of_the_end(name, info):
                self._file(self._session, name, name, again=True)
        self._file(self._session, METADATA_FILE, METADATA_FILE, again=True)
        self._progress.complete, self._progress.problem = True, None
        try:
            self._store.send_bytes(self._progress.content(), UPLOAD_FILE)
        except SessionError:
            self._progress.complete = False
            raise
        return True

    def _while_it_runs(self) -> None:
        """That it is there, what it is, and how far it goes."""
        is_new = self._segments_said != self._progress.segments
        if not is_new and time.monotonic() - self._metadata_at < METADATA_SEC:
            return
        if not self._session.has(METADATA_FILE):
            return
        self._store.send_bytes(self._progress.content(), UPLOAD_FILE)
        self._file(self._session, METADATA_FILE, METADATA_FILE, again=True)
        self._segments_said, self._metadata_at = self._progress.segments, time.monotonic()

    def _has_ended(self) -> bool:
        """Whether its tables are complete: what made them has gone."""
        if self._session.has_folder(JOURNAL_FOLDER) or not self._session.has(METADATA_FILE):
            return False
        return json.loads(self._session.read(METADATA_FILE)).get("ended_at") is not None

    def _is_of_the_end(self, name: str, info: os.stat_result) -> bool:
        """Whether it is sent once the session has ended: tables, totals, marks. A pipe that
        somebody put there would hold up all, and a link lead elsewhere."""
        is_file = not name.startswith(".") and stat.S_ISREG(info.st_mode)
        return is_file and name not in (METADATA_FILE, UPLOAD_FILE)

    def _closed(self) -> list[int]:
        with suppress(FileNotFoundError), self._session.folder(SEGMENTS_FOLDER) as here:
            return sorted(int(name) for name in here.names() if _NUMBER.fullmatch(name))
        return []

    def _segment(self, number: int) -> None:
        """Send a closed segment, its index last."""
        name = folder_name(number)
        place = f"{SEGMENTS_FOLDER}/{name}"
        try:
            with (
                self._session.folder(SEGMENTS_FOLDER) as here,
                here.folder(name) as segment,
            ):
                index = json.loads(segment.read(INDEX_FILE))
                for file in (*index["tables"], INDEX_FILE):
                    self._file(segment, file, f"{place}/{file}")
        except FileNotFoundError:
            # It was removed, as more is there than is to be kept.
            self._progress.missed += 1
        self._progress.segments = number
        self._progress.write()

    def _file(self, folder: Folder, name: str, target: str, *, again: bool = False) -> None:
        """Send a file, and ask whether it is there. ``again``: it may be another one by now."""
        assert self._there is not None

        def opened() -> BinaryIO:
            return open(folder.open(name, os.O_RDONLY), "rb")

        with opened() as file:
            size = os.fstat(file.fileno()).st_size
        if not again and self._there.get(target) == size:
            return
        self._store.send_opened(opened, target)
        found = self._store.size_of(target)
        if found is None or (found != size and not again):
            raise SessionError(f"{self._store.url}/{target} is not there though it was sent")
        self._there[target] = found


def upload(sender: Sender, progress: Progress) -> int:
    """Send the session until it has ended and is all there; returns the exit code."""
    wait = POLL_SEC
    while True:
        try:
            if sender.turn():
                progress.write()
                return 0
        except (SessionError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            progress.failed(_line(error))
            wait = min(2 * wait, LONGEST_WAIT_SEC)
        else:
            wait, progress.problem = POLL_SEC, None
            progress.write()
        if sender.is_orphaned:
            return 0
        time.sleep(wait)


def _line(error: Exception) -> str:
    if isinstance(error, SessionError):
        return str(error)
    return error.strerror or "" if isinstance(error, OSError) else "the session is damaged"
