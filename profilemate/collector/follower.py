# SPDX-License-Identifier: Apache-2.0
"""The tables of a session, as far as its journals have been read."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from profilemate.collector import gpu_memory, metadata, totals_file, worker
from profilemate.collector.clock import Clock
from profilemate.collector.decode import Episode
from profilemate.collector.endpoint import Endpoint
from profilemate.collector.gpu_memory import Sampler
from profilemate.collector.producer import Producer
from profilemate.collector.segments import Segments
from profilemate.collector.snapshot_log import SnapshotLog
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.collector.uploads import Uploads
from profilemate.collector.worker import Worker
from profilemate.format import session
from profilemate.format.folder import Folder
from profilemate.format.journal import file_name, parse_name
from profilemate.format.totals import TOTALS_FILE, RunTotals

_time = attrgetter("time")


class Papers(NamedTuple):
    """What a session has beside its tables at a moment: files by name, and its metadata.json."""

    files: dict[str, bytes]
    metadata: dict[str, Any]


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
        uploads: Uploads | None = None,
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
        self.hurries = 0
        self.segments = Segments(self.folder)
        self.snapshots = SnapshotLog.of(self.folder)
        self._clock = Clock.of(self.folder)
        self._needed: dict[str, int] = {}
        self._sampler = sampler
        self._endpoint = endpoint or Endpoint(None)
        self._uploads = uploads
        self._samples = self.tables.extend(gpu_memory.TABLE)
        if sampler is None:
            self.totals.gpus = totals_file.earlier_gpus(self.folder)

    def _open(self, folder: Folder | Path) -> Folder:
        if isinstance(folder, Folder):
            return folder
        return self._opened.enter_context(Folder.own(folder))

    def discover(self) -> None:
        """Find the journals that are new since the last call."""
        for name, numbers in self._files().items():
            if name not in self.producers:
                # A process that comes too late takes its journal away again.
                with contextlib.suppress(FileNotFoundError):
                    self.producers[name] = Producer(
                        self.journals.path / file_name(name, 1),
                        self.founding,
                        self.tables,
                        self.totals,
                        self.journals.fd,
                        self._first_of(name, numbers),
                    )

    def _files(self) -> dict[str, list[int]]:
        """The numbers of each journal's files."""
        found: dict[str, list[int]] = {}
        for entry in filter(None, map(parse_name, self.journals.names())):
            found.setdefault(entry[0], []).append(entry[1])
        return found

    def _first_of(self, name: str, numbers: list[int]) -> int:
        """The number of the first file that is still there. Of the first one at least the name is:
        it says that there is such a producer."""
        first, *others = sorted(numbers)
        info = self.journals.stat(file_name(name, first))
        return others[0] if others and info is not None and not info.st_size else first

    def resume(self) -> None:
        """Go on from the last closed segment, if there is one. What the tables have beyond it comes
        again.

        Raises:
            SessionError: the segments cannot be read.

        """
        saved = self.segments.restore()
        if saved is not None:
            self._restore(saved)

    @property
    def can_be_saved(self) -> bool:
        """Whether who goes on from here comes to the same tables."""
        return all(producer.can_be_saved for producer in self.producers.values())

    def cut(self, applied_ns: int) -> None:
        """End the open segment. All episodes up to this time have been applied, and no later one.

        Raises:
            OSError: the tables cannot be moved.

        """
        end_sec = round(self.seconds(applied_ns), 6)
        self.segments.cut(self.tables, end_sec, self._saved(), self._opening())

    def seconds(self, time_ns: int) -> float:
        """A time of the monotonic clock, in seconds of the session."""
        return (time_ns - self.founding.origin_ns) / 1e9

    @property
    def position(self) -> int:
        """Bytes of all journals that have been read."""
        return sum(producer.position for producer in self.producers.values())

    def _saved(self) -> dict[str, Any]:
        """All that has come of the journals so far, as JSON."""
        self._needed = {name: each.needed_from for name, each in self.producers.items()}
        return {
            "producers": list(filter(None, (each.saved() for each in self.ordered()))),
            "totals": self.totals.saved(),
            "table_bytes": self.tables.bytes_written,
            "lag_ns": self.lag_ns,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        for each in saved["producers"]:
            self.producers[each["name"]] = Producer.restored(
                each,
                self.journals.path,
                self.founding,
                self.tables,
                self.totals,
                self.journals.fd,
            )
        self.totals.restore(saved["totals"])
        self.tables.bytes_written, self.lag_ns = saved["table_bytes"], saved["lag_ns"]

    def _opening(self) -> dict[str, list[str]]:
        """By table, rows that explain what comes now, where earlier rows are gone."""
        rows: dict[str, list[str]] = {}
        for producer in self.ordered():
            if producer.state is not None:
                for table, of_state in producer.state.opening().items():
                    rows.setdefault(table, []).extend(of_state)
        return {table: of_table for table, of_table in rows.items() if of_table}

    def drop_read_journals(self) -> None:
        """Remove the journals' files that led to the last closed segment and no further."""
        files = self._files()
        for name, number in self._needed.items():
            for earlier in [each for each in files.get(name, ()) if each < number]:
                if earlier > 1:
                    self.journals.remove(file_name(name, earlier))
                else:
                    os.close(self.journals.open(file_name(name, 1), os.O_WRONLY | os.O_TRUNC))

    def read(self) -> int:
        """Read what all producers wrote, up to a limit each; returns the bytes."""
        return sum(producer.read() for producer in self.ordered())

    @property
    def unread_since(self) -> int | None:
        """No journal may still have an episode that is earlier than this; None: they have none."""
        others = [each for each in self.producers.values() if not each.exhausted]
        bounds = (each.episodes[-1].time if each.episodes else 0 for each in others)
        return min(bounds, default=None)

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
        found = self._run_totals(ended=ended)
        totals_file.write(self.tables.folder, found)
        self._endpoint.show(found)

    def write(self, *, ended: bool) -> None:
        """Write the rows, the totals and metadata.json."""
        self.tables.flush()
        worker.write_usage(self.tables.folder, self._workers())
        self.write_totals(ended=ended)
        metadata.write(self.tables.folder, self._metadata(ended=ended), self.totals)

    def papers(self) -> Papers:
        """What a session has beside its tables, as it is now."""
        self.tables.flush()
        summary = self.totals.summary()
        found = {
            worker.USAGE_TABLE: worker.usage_table(self._workers()),
            metadata.SUMMARY_FILE: None if summary is None else summary.encode(),
            TOTALS_FILE: totals_file.as_bytes(self._run_totals(ended=False)),
        }
        files = {name: content for name, content in found.items() if content is not None}
        return Papers(files, self._metadata(ended=False))

    def _workers(self) -> list[Worker]:
        states = (producer.state for producer in self.ordered())
        return [state for state in states if isinstance(state, Worker)]

    def _run_totals(self, *, ended: bool) -> RunTotals:
        followed = self._sampler is not None
        return totals_file.content(
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

    def _metadata(self, *, ended: bool) -> dict[str, Any]:
        sampler = self._sampler
        if sampler is not None:
            # Where tables are completed afterwards, the clocks may be those of another boot.
            self._clock.check(self.founding)
        return metadata.content(
            self.founding,
            self.ordered(),
            self.tables,
            sampler.state() if sampler else gpu_memory.earlier_sampling(self.folder),
            self._endpoint.state(),
            self._uploads.state() if self._uploads else None,
            segments=self.segments,
            snapshots=self.snapshots.content(),
            clock=self._clock.content(),
            ended=ended,
            lag_sec=self.lag_ns / 1e9 if self.lag_ns else None,
            hurries=self.hurries,
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
    def pauses(self) -> list[int]:
        """Of each process a number that changes whenever it pauses or goes on."""
        return [each.state.pauses.turns for each in self.ordered() if each.state is not None]

    @property
    def size(self) -> int:
        """Bytes of all journals."""
        names = [name for name in self.journals.names() if parse_name(name)]
        return sum(info.st_size for info in map(self.journals.stat, names) if info is not None)

    def session_size(self) -> int:
        """Bytes that the session takes on the disk."""
        return self.folder.size() + self.journals.size() + self.segments.size()

    @property
    def alive(self) -> bool:
        """Whether any producer may still write."""
        return any(producer.alive for producer in self.producers.values())

    def ordered(self) -> list[Producer]:
        """The producers in the order of their names."""
        return [self.producers[name] for name in sorted(self.producers)]
