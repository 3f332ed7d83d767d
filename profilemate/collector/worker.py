# SPDX-License-Identifier: Apache-2.0
"""The state of one worker, rebuilt from its events: its CUDA graphs, and what ran in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from profilemate.collector.contents import content_ids
from profilemate.collector.decode import GAP, Episode, ImpossibleError
from profilemate.collector.experts import Experts
from profilemate.collector.gpu_steps import GpuSteps
from profilemate.collector.header import Header
from profilemate.collector.pauses import Pauses
from profilemate.collector.tables import COLUMNS, Tables, text_cell
from profilemate.collector.totals import Totals
from profilemate.collector.worker_totals import UNKNOWN
from profilemate.format.events import More, Op
from profilemate.format.folder import Folder

USAGE_TABLE = "cuda_graph_usage.csv"
CAPTURES_TABLE = "cuda_graph_captures.csv"

_NO_BATCH = (None,) * 5
_UNKNOWN = (*_NO_BATCH, "unknown", "capture", "unknown")
"""The entry of replays of graphs whose capture was not seen."""


class Entry:
    """The CUDA graphs that were captured for one batch descriptor, and their replays.

    ``batch`` is the descriptor, ``cells`` are a table's for it. ``graphs`` counts the CUDA graphs,
    ``since_ns`` is when the capture of the first one began. ``replayed`` and ``replayed_dummy``
    count replays of CUDA graphs; the first includes the second. ``gpu_ns`` is None until a replay
    was measured on the GPU.
    """

    __slots__ = (
        "batch",
        "cells",
        "gpu_ns",
        "graphs",
        "kind",
        "launch_ns",
        "part",
        "replayed",
        "replayed_dummy",
        "since_ns",
        "source",
    )

    def __init__(self, description: Iterable[Any]) -> None:
        *batch, self.source, self.kind, self.part = description
        self.batch = tuple(batch)
        self.cells = _cells(batch)
        self.since_ns: int | None = None
        self.graphs = 0
        self.replayed = 0
        self.replayed_dummy = 0
        self.launch_ns = 0
        self.gpu_ns: int | None = None

    def saved(self) -> dict[str, Any]:
        """All of it, as JSON."""
        values = {name: getattr(self, name) for name in _COUNTS}
        return {"description": [*self.batch, self.source, self.kind, self.part], **values}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Entry:
        """The entry as it was when it was ``saved``."""
        self = cls(saved["description"])
        for name in _COUNTS:
            setattr(self, name, saved[name])
        return self

    @property
    def whole(self) -> int:
        """Graphs of one replay of the whole. Without a capture each graph counts as a replay."""
        return self.graphs or 1

    def replay(self, graphs: int, launch_ns: int, gpu_ns_and_1: int, dummy: int) -> None:
        """So many of the CUDA graphs were replayed."""
        self.replayed += graphs
        self.replayed_dummy += graphs * dummy
        self.launch_ns += launch_ns
        if gpu_ns_and_1:
            self.gpu_ns = (self.gpu_ns or 0) + gpu_ns_and_1 - 1


_COUNTS = ("since_ns", "graphs", "replayed", "replayed_dummy", "launch_ns", "gpu_ns")


class _Captures:
    """The captures of an entry that are in no row yet: when the first began, and their sums.

    ``kib`` is None where the memory of one of them is not known.
    """

    __slots__ = ("began", "graphs", "kib", "took_ns")

    def __init__(self, began: int) -> None:
        self.began = began
        self.graphs = 0
        self.took_ns = 0
        self.kib: int | None = 0


class Worker:
    """One worker's state. ``header`` is its journal's; ``origin_ns`` is second 0 of the session.

    It grows with the number of entries and batch descriptors, not with that of executions.
    """

    mismatches = 0

    def __init__(
        self, header: Header, origin_ns: int, key: bytes, tables: Tables, totals: Totals
    ) -> None:
        self.rank = header.rank
        self.shape = header.shape
        self.last_ns = origin_ns
        self.content_ids = content_ids(key)
        self._origin = origin_ns
        self._timed = header.gpu_timing
        self._captures = tables.append(CAPTURES_TABLE)
        self._capture_rows: list[str] = []
        self._timeline = tables.append("cuda_graph_timeline.csv")
        self._entries = {0: Entry(_UNKNOWN)}
        self._batches: dict[int, str] = {}
        self._totals = totals.worker(self.rank)
        self._open: dict[int, _Captures] = {}
        self._misses_events = False
        self._experts = Experts(header.rank, origin_ns, tables, self._totals)
        self._steps = GpuSteps(header.rank, origin_ns, tables)
        self.pauses = Pauses()

    def apply(self, episode: Episode) -> None:
        """Apply the events of one episode."""
        for op, event in zip(episode.ops, episode.events, strict=True):
            _HANDLERS[op](self, *event)
        self.last_ns = max(self.last_ns, episode.time)

    def close(self) -> None:
        """Nothing more comes: write what is still open."""
        self._write_captures()

    def miss_events(self, reason: str) -> None:
        """Events that came here are missing. Entries and batches that they described are unknown
        from now on."""
        self._misses_events = True
        self._write_captures()

    def saved(self) -> dict[str, Any]:
        """All of it between two episodes, as JSON."""
        return {
            "last_ns": self.last_ns,
            "entries": [[number, entry.saved()] for number, entry in self._entries.items()],
            "batches": [*self._batches.items()],
            "open": [
                [number, each.began, each.graphs, each.took_ns, each.kib]
                for number, each in self._open.items()
            ],
            "capture_rows": self._capture_rows,
            "misses_events": self._misses_events,
            "pauses": self.pauses.times,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        self.last_ns = saved["last_ns"]
        self._entries = {number: Entry.restored(entry) for number, entry in saved["entries"]}
        self._batches = dict(saved["batches"])
        for number, began, *counts in saved["open"]:
            captures = self._open[number] = _Captures(began)
            captures.graphs, captures.took_ns, captures.kib = counts
        self._capture_rows = saved["capture_rows"]
        self._misses_events = saved["misses_events"]
        self.pauses.times = saved["pauses"]

    def opening(self) -> dict[str, list[str]]:
        """By table, rows that explain what comes now, where earlier rows are gone."""
        return {CAPTURES_TABLE: self._capture_rows}

    def usage(self) -> list[tuple[tuple[Any, ...], str]]:
        """The rows of cuda_graph_usage.csv as of now, each with its sort key."""
        rows = []
        for number, entry in self._entries.items():
            if entry.replayed or (entry.graphs and entry.kind == "capture"):
                mode, tokens, *_ = entry.batch
                order = (self.rank, entry.part, mode or "", tokens or 0, number)
                rows.append((order, self._usage_row(entry)))
        return rows

    def _graph(self, _: int, number: int, blob: bytes) -> None:
        self._write_captures()
        if number in self._entries:
            raise ImpossibleError(f"entry {number:,} is there twice")
        description = _described(blob, len(_UNKNOWN))
        if None in description[len(_NO_BATCH) :]:
            raise ImpossibleError(f"entry {number:,} is not described as one")
        self._entries[number] = Entry(description)

    def _captured(self, ended: int, began: int, number: int, kib_and_1: int) -> None:
        if ended < began:
            raise ImpossibleError("a capture ended before it began")
        number = self._known(number)
        entry = self._entries[number]
        if entry.since_ns is None:
            entry.since_ns = began
        entry.graphs += 1
        captures = self._open.setdefault(number, _Captures(began))
        captures.graphs += 1
        captures.took_ns += ended - began
        if not kib_and_1:
            captures.kib = None
        elif captures.kib is not None:
            captures.kib += kib_and_1 - 1

    def _batch(self, _: int, number: int, blob: bytes) -> None:
        if number in self._batches:
            raise ImpossibleError(f"batch {number:,} is there twice")
        self._batches[number] = _cells(_described(blob, len(_NO_BATCH)))

    def _executed(
        self,
        ended: int,
        batch: int,
        tokens: int,
        number: int,
        graphs: int,
        launch_ns: int,
        gpu_ns_and_1: int,
        dummy: int,
    ) -> None:
        if dummy > 1:
            raise ImpossibleError("an execution that is neither a dummy nor none")
        launch_us = gpu_us = ""
        number = self._known(number)
        if graphs:
            self._write_captures()
            self._entries[number].replay(graphs, launch_ns, gpu_ns_and_1, dummy)
            launch_us = _microseconds(launch_ns)
        if gpu_ns_and_1:
            gpu_us = _microseconds(gpu_ns_and_1 - 1)
        if batch and self._misses_events:
            cells = self._batches.get(batch, _cells(_NO_BATCH))
        else:
            cells = self._batches[batch] if batch else self._entries[number].cells
        self._totals.execute(cells, tokens, graphs, dummy)
        self._timeline(
            f"{self._seconds(ended)},{cells},{tokens},{launch_us},{gpu_us},"
            f"{dummy},{self.rank},{graphs}"
        )

    def _replayed(
        self, _: int, number: int, graphs: int, launch_ns: int, gpu_ns_and_1: int
    ) -> None:
        self._entries[self._known(number)].replay(graphs, launch_ns, gpu_ns_and_1, 0)

    def _more(self, time: int, kind: int, blob: bytes) -> None:
        if kind == More.PHASES:
            self._steps.apply(time, blob)
        else:
            self._experts.apply(time, kind, blob)

    def _pause(self, time: int) -> None:
        self.pauses.begin(time)

    def _resume(self, time: int, *_: Any) -> None:
        self.pauses.end(time)

    def _known(self, number: int) -> int:
        """The entry of this number; that of unknown graphs where it may have been missed."""
        return 0 if self._misses_events and number not in self._entries else number

    def _write_captures(self) -> None:
        """Write the rows of the entries that were captured since the last call."""
        for number, captures in self._open.items():
            entry = self._entries[number]
            memory = "" if captures.kib is None else captures.kib << 10
            row = (
                f"{entry.cells},{self._seconds(captures.began)},"
                f"{captures.took_ns / 1e9:.6f},{captures.graphs},{memory},"
                f"{text_cell(entry.source)},{text_cell(entry.kind)},{self.rank},"
                f"{text_cell(entry.part)}"
            )
            self._capture_rows.append(row)
            self._captures(row)
        self._open.clear()

    def replays(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """Replays so far, how many of them were dummies, and the nanoseconds of their launches, by
        mode and part."""
        sums: dict[tuple[str, str], tuple[int, int, int]] = {}
        for entry in self._entries.values():
            if entry.replayed:
                key = (entry.batch[0] or UNKNOWN, entry.part)
                replays, dummies, launch_ns = sums.get(key, (0, 0, 0))
                sums[key] = (
                    replays + entry.replayed // entry.whole,
                    dummies + entry.replayed_dummy // entry.whole,
                    launch_ns + entry.launch_ns,
                )
        return sums

    def _usage_row(self, entry: Entry) -> str:
        graphs = entry.whole
        gpu_ns = entry.gpu_ns
        if gpu_ns is None and self._timed and not entry.replayed:
            gpu_ns = 0
        cells = (
            entry.cells,
            entry.replayed // graphs,
            f"{entry.launch_ns / 1e9:.6f}",
            "" if gpu_ns is None else f"{gpu_ns / 1e9:.6f}",
            self.rank,
            entry.graphs or "",
            text_cell(entry.source),
            text_cell(entry.part),
            entry.replayed_dummy // graphs,
            "" if entry.since_ns is None else self._seconds(entry.since_ns),
        )
        return ",".join(map(str, cells))

    def _seconds(self, time: int) -> str:
        return f"{(time - self._origin) / 1e9:.6f}"


def write_usage(folder: Folder, workers: Iterable[Worker]) -> None:
    """Write cuda_graph_usage.csv anew, whole or not at all; no file where it would have no row."""
    content = usage_table(workers)
    if content is not None:
        folder.write(USAGE_TABLE, content)


def usage_table(workers: Iterable[Worker]) -> bytes | None:
    """All of cuda_graph_usage.csv; None where it would have no row."""
    rows = sorted(row for worker in workers for row in worker.usage())
    if not rows:
        return None
    return "\n".join([f"{COLUMNS[USAGE_TABLE]}", *(row for _, row in rows), ""]).encode()


def _described(blob: bytes, length: int) -> list[Any]:
    """The values that describe a batch, and what else an entry has, which is text."""
    values = json.loads(blob)
    if not isinstance(values, list) or len(values) != length:
        raise ImpossibleError("a batch that is not described as one")
    for place, value in enumerate(values):
        is_number = 0 < place < len(_NO_BATCH)
        fits = type(value) is int and value >= 0 if is_number else isinstance(value, str)
        if not (fits or value is None):
            raise ImpossibleError(f"a batch that is described by {str(value)[:40]!r}")
    return values


def _cells(values: Iterable[Any]) -> str:
    return ",".join("" if value is None else text_cell(str(value)) for value in values)


def _microseconds(nanoseconds: int) -> str:
    return str((nanoseconds + 500) // 1000)


_HANDLERS: dict[int, Callable[..., None]] = {
    Op.MORE: Worker._more,
    Op.GRAPH: Worker._graph,
    Op.CAPTURE: Worker._captured,
    Op.BATCH: Worker._batch,
    Op.EXECUTION: Worker._executed,
    Op.REPLAY: Worker._replayed,
    Op.LOST: lambda *_: None,
    Op.PAUSE: Worker._pause,
    Op.RESUME: Worker._resume,
    GAP: Worker.miss_events,
}
