# SPDX-License-Identifier: Apache-2.0
"""Follow a session while vLLM runs: journals in, tables out, until every producer is gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from profilemate import session
from profilemate.collector import metadata
from profilemate.collector.producer import Producer
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals

POLL_SEC = 0.1
METADATA_SEC = 2.0

MERGE_NS = 200_000_000
"""With several producers, frames are replayed in the order of their times; this long after its
time a frame is taken to be on disk."""


class Follower:
    """The tables of one session, as far as its journals have been read.

    Finalizing is following, with all producers gone.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder = folder
        self.journals = folder / session.JOURNAL_FOLDER
        self.founding = session.read_founding(self.journals)
        self.tables = Tables(target)
        self.totals = Totals()
        self.producers: dict[str, Producer] = {}
        self.lag_ns = 0

    def discover(self) -> None:
        """Find the journals that appeared since the last call."""
        for path in sorted(self.journals.glob("*.journal")):
            if path.stem not in self.producers:
                self.producers[path.stem] = Producer(path, self.founding, self.tables, self.totals)

    def read(self) -> bool:
        """Read what all producers wrote; whether that was anything."""
        return sum(producer.read() for producer in self._ordered()) > 0

    def replay(self, until: int | None = None) -> None:
        """Replay the frames whose time is at most ``until``, in the order of their times."""
        due = []
        for producer in self._ordered():
            frames = producer.frames
            count = len(frames)
            if until is not None:
                count = sum(1 for when, _ in frames if when <= until)
            due += [(when, producer.name, at) for at, (when, _) in enumerate(frames[:count])]
        for _, name, at in sorted(due):
            producer = self.producers[name]
            producer.replay(producer.frames[at][1])
        for producer in self._ordered():
            done = sum(1 for _, name, _ in due if name == producer.name)
            del producer.frames[:done]

    def write(self, *, ended: bool) -> None:
        """Write the rows, and what the session is."""
        self.tables.flush()
        lag = self.lag_ns / 1e9 if self.lag_ns else None
        metadata.write(
            self.tables.folder,
            self.founding,
            self._ordered(),
            self.tables,
            self.totals,
            ended=ended,
            lag_sec=lag,
        )

    def close(self) -> None:
        """Nothing more comes: replay what is left and write everything."""
        self.replay()
        for producer in self._ordered():
            producer.close()
        self.write(ended=True)
        self.tables.close()

    @property
    def alive(self) -> bool:
        """Whether any producer may still write."""
        return any(producer.alive for producer in self.producers.values())

    def _ordered(self) -> list[Producer]:
        return [self.producers[name] for name in sorted(self.producers)]


def follow(folder: Path) -> None:
    """Follow the session to its end, and remove its journals when the tables are complete.

    Raises:
        SessionError, JournalError: the session cannot be read.
        OSError: the tables cannot be written.

    """
    follower = Follower(folder, folder)
    next_metadata = 0.0
    while True:
        follower.discover()
        alive = follower.alive or not follower.producers
        # Asked before reading: what a producer wrote before it went is read below.
        read = follower.read()
        now = time.monotonic_ns()
        _note_lag(follower, now)
        follower.replay(None if len(follower.producers) == 1 else now - MERGE_NS)
        follower.tables.flush()
        if time.monotonic() >= next_metadata:
            follower.write(ended=False)
            next_metadata = time.monotonic() + METADATA_SEC
        if not alive and not read and follower.producers:
            break
        if not read:
            time.sleep(POLL_SEC)
    follower.close()
    remove_journals(folder)


def _note_lag(follower: Follower, now: int) -> None:
    for producer in follower.producers.values():
        if producer.frames:
            follower.lag_ns = max(follower.lag_ns, now - producer.frames[0][0])


def remove_journals(folder: Path) -> None:
    """Remove the journal folder: its content is in the tables."""
    journals = folder / session.JOURNAL_FOLDER
    # The secret goes first: without it nothing in the journals can be made sense of again.
    for path in sorted(journals.iterdir(), key=lambda path: path.name != session.FOUNDING_FILE):
        path.unlink(missing_ok=True)
    os.rmdir(journals)
