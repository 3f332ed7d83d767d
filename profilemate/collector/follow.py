# SPDX-License-Identifier: Apache-2.0
"""Follow a session while vLLM runs: journals in, tables out, until every producer is gone."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from operator import attrgetter
from pathlib import Path

from profilemate.collector import gpu_memory, metadata, worker
from profilemate.collector.decode import Episode
from profilemate.collector.gpu_memory import Sampler
from profilemate.collector.producer import Producer
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.collector.worker import Worker
from profilemate.format import session

POLL_SEC = 0.1
METADATA_SEC = 2.0

BACKLOG_BYTES = 1 << 17
"""After a read of this much there is likely more: it is read without a pause."""

MERGE_NS = 400_000_000
"""Episodes of all producers are applied in the order of their times, so that the tables come out
the same whenever they are made. One counts as written this long after its time."""

_time = attrgetter("time")


class Follower:
    """The tables of one session, as far as its journals have been read.

    To finalize a session is to follow it when all producers are gone and nothing is sampled.
    """

    def __init__(self, folder: Path, target: Path, sampler: Sampler | None = None) -> None:
        self.folder = folder
        self.journals = folder / session.JOURNAL_FOLDER
        self.founding = session.read_founding(self.journals)
        self.tables = Tables(target)
        self.totals = Totals()
        self.producers: dict[str, Producer] = {}
        self.lag_ns = 0
        self._sampler = sampler
        self._samples = self.tables.extend(gpu_memory.TABLE)

    def discover(self) -> None:
        """Find the journals that are new since the last call."""
        for path in sorted(self.journals.glob("*.journal")):
            if path.stem not in self.producers:
                self.producers[path.stem] = Producer(path, self.founding, self.tables, self.totals)

    def read(self) -> int:
        """Read what all producers wrote, up to a limit each; returns the bytes."""
        return sum(producer.read() for producer in self.ordered())

    def apply(self, until: int | None = None) -> int | None:
        """Apply the episodes whose time is at most ``until``, in the order of their times.

        Returns the time of the first one, None where there was none.
        """
        due: list[tuple[Producer, Episode]] = []
        for producer in self.ordered():
            count = len(producer.episodes)
            if until is not None:
                count = bisect_right(producer.episodes, until, key=_time)
            due += [(producer, episode) for episode in producer.episodes[:count]]
            del producer.episodes[:count]
        # Episodes of one time stay in the order of their producers' names.
        due.sort(key=lambda pair: pair[1].time)
        for producer, episode in due:
            producer.apply(episode)
        self.tables.flush()
        return due[0][1].time if due else None

    def write(self, *, ended: bool) -> None:
        """Write the rows, metadata.json and the totals."""
        self.tables.flush()
        producers = self.ordered()
        workers = [producer.state for producer in producers if isinstance(producer.state, Worker)]
        worker.write_usage(self.tables.folder, workers)
        sampler = self._sampler
        sampling = sampler.state() if sampler else gpu_memory.earlier_sampling(self.folder)
        metadata.write(
            self.tables.folder,
            self.founding,
            producers,
            self.tables,
            self.totals,
            sampling,
            ended=ended,
            lag_sec=self.lag_ns / 1e9 if self.lag_ns else None,
        )

    def sample(self) -> None:
        """Have the workers' GPUs sampled, and write the samples that have come."""
        if self._sampler is not None:
            states = ((producer.state, producer.header) for producer in self.ordered())
            self._sampler.watch([header for state, header in states if isinstance(state, Worker)])
            self._samples(self._sampler.rows())

    def close(self) -> None:
        """Nothing more comes: apply what is left and write everything."""
        if self._sampler is not None:
            self._sampler.stop()
            self._samples(self._sampler.rows())
        self.apply()
        for producer in self.ordered():
            producer.close()
        self.write(ended=True)
        self.tables.close()

    def retire(self) -> bool:
        """Let no process join the session any more; returns False if one just has."""
        session.close_to_newcomers(self.journals)
        known = len(self.producers)
        self.discover()
        if len(self.producers) == known:
            return True
        session.reopen(self.journals)
        return False

    @property
    def alive(self) -> bool:
        """Whether any producer may still write."""
        return any(producer.alive for producer in self.producers.values())

    def ordered(self) -> list[Producer]:
        """The producers in the order of their names."""
        return [self.producers[name] for name in sorted(self.producers)]


def follow(folder: Path) -> None:
    """Follow the session to its end, and remove its journals when the tables are complete.

    Raises:
        SessionError: the session cannot be read.
        OSError: the tables cannot be written.

    """
    founding = session.read_founding(folder / session.JOURNAL_FOLDER)
    follower = Follower(folder, folder, Sampler(founding.origin_ns))
    next_metadata = 0.0
    while True:
        follower.discover()
        # Before reading: what a producer wrote before it ended is read below.
        alive = follower.alive or not follower.producers
        read = follower.read()
        follower.sample()
        first = follower.apply(time.monotonic_ns() - MERGE_NS)
        if first is not None:
            follower.lag_ns = max(follower.lag_ns, time.monotonic_ns() - first)
        if time.monotonic() >= next_metadata:
            follower.write(ended=False)
            next_metadata = time.monotonic() + METADATA_SEC
        if not alive and not read and follower.retire():
            break
        if read < BACKLOG_BYTES:
            time.sleep(POLL_SEC)
    follower.close()
    remove_journals(folder)


def remove_journals(folder: Path) -> None:
    """Remove the journal folder, all of which is in the tables."""
    journals = folder / session.JOURNAL_FOLDER
    for path in journals.iterdir():
        path.unlink(missing_ok=True)
    os.rmdir(journals)
