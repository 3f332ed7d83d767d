# SPDX-License-Identifier: Apache-2.0
"""Follow a session while vLLM runs: journals in, tables out, until every producer is gone."""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_right
from operator import attrgetter
from pathlib import Path, PurePath
from typing import NoReturn

from profilemate import config
from profilemate.collector import gpu_memory, leftovers, metadata, totals_file, worker
from profilemate.collector.decode import Episode
from profilemate.collector.endpoint import Endpoint
from profilemate.collector.gpu_memory import Sampler
from profilemate.collector.producer import Producer
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.collector.worker import Worker
from profilemate.format import session
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder

POLL_SEC = 0.1
METADATA_SEC = 2.0
TOTALS_SEC = 1.0

BACKLOG_BYTES = 1 << 17
"""After a read of this much there is likely more: it is read without a pause."""

MERGE_NS = 400_000_000
"""Episodes of all producers are applied in the order of their times, so that the tables come out
the same whenever they are made. One counts as written this long after its time."""

FIRST_SEC = 60.0
"""Who starts a collector has made a journal. Where none comes for so long, it was deleted."""

_time = attrgetter("time")


class Follower:
    """The tables of one session, as far as its journals have been read.

    To finalize a session is to follow it when all producers are gone and nothing is sampled.

    ``folder`` is the session's, and ``target`` that of the tables; where a path is given, the
    follower opens it. ``journals`` is the folder of the journals, where it has another name.
    """

    def __init__(
        self,
        folder: Folder | Path,
        target: Folder | Path,
        sampler: Sampler | None = None,
        journals: Folder | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self._opened = contextlib.ExitStack()
        self.folder = self._open(folder)
        self.journals = journals or self._opened.enter_context(
            self.folder.folder(session.JOURNAL_FOLDER)
        )
        self.founding = session.read_founding(self.journals)
        self.tables = Tables(self._open(target))
        self.totals = Totals()
        self.producers: dict[str, Producer] = {}
        self.lag_ns = 0
        self.last_lag_ns = 0
        self._sampler = sampler
        self._endpoint = endpoint or Endpoint(None)
        self._samples = self.tables.extend(gpu_memory.TABLE)
        if sampler is None:
            self.totals.gpus = totals_file.earlier_gpus(self.folder)

    def _open(self, folder: Folder | Path) -> Folder:
        if isinstance(folder, Folder):
            return folder
        return self._opened.enter_context(Folder.own(folder))

    def discover(self) -> None:
        """Find the journals that are new since the last call."""
        for path in map(PurePath, self.journals.names()):
            if path.suffix == ".journal" and path.stem not in self.producers:
                # A process that comes too late takes its journal away again.
                with contextlib.suppress(FileNotFoundError):
                    self.producers[path.stem] = Producer(
                        self.journals.path / path,
                        self.founding,
                        self.tables,
                        self.totals,
                        self.journals.fd,
                    )

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
        self.totals.fold()
        self.tables.flush()
        return due[0][1].time if due else None

    def lags(self, lag_ns: int) -> None:
        """It took so long from the first event of a round to its table; 0: there was none."""
        self.last_lag_ns = lag_ns
        self.lag_ns = max(self.lag_ns, lag_ns)

    def write_totals(self, *, ended: bool) -> None:
        """Write totals.json, and offer the same as metrics."""
        followed = self._sampler is not None
        found = totals_file.content(
            self.founding,
            self.ordered(),
            self.totals,
            {
                "lag_ns": self.last_lag_ns if followed else None,
                "longest_lag_ns": self.lag_ns if followed else None,
                "table_bytes": self.tables.bytes_written,
            },
            ended=ended,
        )
        totals_file.write(self.tables.folder, found)
        self._endpoint.show(found)

    def write(self, *, ended: bool) -> None:
        """Write the rows, the totals and metadata.json."""
        self.tables.flush()
        producers = self.ordered()
        workers = [producer.state for producer in producers if isinstance(producer.state, Worker)]
        worker.write_usage(self.tables.folder, workers)
        self.write_totals(ended=ended)
        sampler = self._sampler
        sampling = sampler.state() if sampler else gpu_memory.earlier_sampling(self.folder)
        metadata.write(
            self.tables.folder,
            self.founding,
            producers,
            self.tables,
            self.totals,
            sampling,
            self._endpoint.state(),
            ended=ended,
            lag_sec=self.lag_ns / 1e9 if self.lag_ns else None,
        )

    def sample(self) -> None:
        """Have the workers' GPUs sampled, and write the samples that have come."""
        if self._sampler is not None:
            states = ((producer.state, producer.header) for producer in self.ordered())
            self._sampler.watch([header for state, header in states if isinstance(state, Worker)])
            self._take(self._sampler.rows())

    def _take(self, samples: list[str]) -> None:
        self._samples(samples)
        self.totals.sampled(samples)

    def close(self) -> None:
        """Nothing more comes: apply what is left and write everything."""
        if self._sampler is not None:
            self._sampler.stop()
            self._take(self._sampler.rows())
        self.apply()
        for producer in self.ordered():
            producer.close()
        self.write(ended=True)
        self.tables.close()
        self._opened.close()

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
    def is_damaged(self) -> bool:
        """Whether some journal could not be read, or applied, to its end."""
        return any(producer.problem is not None for producer in self.producers.values())

    @property
    def size(self) -> int:
        """Bytes of all journals."""
        names = [f"{name}.journal" for name in self.producers]
        return sum(info.st_size for info in map(self.journals.stat, names) if info is not None)

    @property
    def alive(self) -> bool:
        """Whether any producer may still write."""
        return any(producer.alive for producer in self.producers.values())

    def ordered(self) -> list[Producer]:
        """The producers in the order of their names."""
        return [self.producers[name] for name in sorted(self.producers)]


def follow(folder: Folder, journals: Folder) -> None:
    """Follow the session to its end, and remove its journals when the tables are complete.

    Raises:
        SessionError: the session cannot be read, its journals were deleted meanwhile, or not all
            of them could be read.
        OSError: the tables cannot be written.

    """
    leftovers.clear(folder, locked=True)
    founding = session.read_founding(journals)
    endpoint = Endpoint(config.read(os.environ).metrics)
    follower = Follower(folder, folder, Sampler(founding.origin_ns), journals, endpoint)
    began = time.monotonic()
    next_metadata = next_totals = 0.0
    while True:
        follower.discover()
        # Before reading: what a producer wrote before it ended is read below.
        alive = follower.alive
        if not follower.producers:
            alive = time.monotonic() - began < FIRST_SEC
        read = follower.read()
        follower.sample()
        first = follower.apply(time.monotonic_ns() - MERGE_NS)
        follower.lags(0 if first is None else time.monotonic_ns() - first)
        if not folder.has_folder(session.JOURNAL_FOLDER):
            _end_without_journals(follower)
        if time.monotonic() >= next_metadata:
            follower.write(ended=False)
            next_metadata = time.monotonic() + METADATA_SEC
            next_totals = time.monotonic() + TOTALS_SEC
        elif time.monotonic() >= next_totals:
            follower.write_totals(ended=False)
            next_totals = time.monotonic() + TOTALS_SEC
        if not alive and not read and follower.retire():
            break
        if read < BACKLOG_BYTES:
            time.sleep(POLL_SEC)
    if not follower.producers:
        return
    follower.close()
    if follower.is_damaged:
        leftovers.keep_journals(folder, journals, session.JOURNAL_FOLDER)
        raise SessionError(f"not all journals could be read: {folder.path / session.KEPT_FOLDER}")
    leftovers.remove_journals(folder, journals, session.JOURNAL_FOLDER)


def _end_without_journals(follower: Follower) -> NoReturn:
    """The folder was deleted while vLLM runs: write what has come of it, and end.

    Raises:
        SessionError: always.

    """
    # The session's own folder may be gone as well.
    with contextlib.suppress(OSError):
        follower.apply()
        follower.write(ended=False)
    raise SessionError(f"{follower.journals.path} was deleted; the tables have what came before")
