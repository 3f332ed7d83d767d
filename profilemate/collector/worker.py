# SPDX-License-Identifier: Apache-2.0
"""The state of one worker, rebuilt from its events: its CUDA graphs, and what ran in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from profilemate.collector.contents import content_ids
from profilemate.collector.decode import Episode, Shape
from profilemate.collector.tables import COLUMNS, Tables
from profilemate.format.events import Op
from profilemate.format.folder import Folder

USAGE_TABLE = "cuda_graph_usage.csv"

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

    def replay(self, graphs: int, launch_ns: int, gpu_ns_and_1: int, dummy: int) -> None:
        """So many of the CUDA graphs were replayed."""
        self.replayed += graphs
        self.replayed_dummy += graphs * dummy
        self.launch_ns += launch_ns
        if gpu_ns_and_1:
            self.gpu_ns = (self.gpu_ns or 0) + gpu_ns_and_1 - 1


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

    shape = Shape(0, 0)
    mismatches = 0

    def __init__(self, header: dict[str, Any], origin_ns: int, key: bytes, tables: Tables) -> None:
        self.rank = int(header["rank"])
        self.last_ns = origin_ns
        self.content_ids = content_ids(key)
        self._origin = origin_ns
        self._timed = bool(header.get("gpu_timing"))
        self._captures = tables.append("cuda_graph_captures.csv")
        self._timeline = tables.append("cuda_graph_timeline.csv")
        self._entries = {0: Entry(_UNKNOWN)}
        self._batches: dict[int, str] = {}
        self._open: dict[int, _Captures] = {}

    def apply(self, episode: Episode) -> None:
        """Apply the events of one episode."""
        for op, event in zip(episode.ops, episode.events, strict=True):
            _HANDLERS[op](self, *event)
        self.last_ns = max(self.last_ns, episode.time)

    def close(self) -> None:
        """Nothing more comes: write what is still open."""
        self._write_captures()

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
        self._entries[number] = Entry(json.loads(blob))

    def _captured(self, ended: int, began: int, number: int, kib_and_1: int) -> None:
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
        self._batches[number] = _cells(json.loads(blob))

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
        launch_us = gpu_us = ""
        if graphs:
            self._write_captures()
            self._entries[number].replay(graphs, launch_ns, gpu_ns_and_1, dummy)
            launch_us = _microseconds(launch_ns)
        if gpu_ns_and_1:
            gpu_us = _microseconds(gpu_ns_and_1 - 1)
        cells = self._batches[batch] if batch else self._entries[number].cells
        self._timeline(
            f"{self._seconds(ended)},{cells},{tokens},{launch_us},{gpu_us},"
            f"{dummy},{self.rank},{graphs}"
        )

    def _replayed(
        self, _: int, number: int, graphs: int, launch_ns: int, gpu_ns_and_1: int
    ) -> None:
        self._entries[number].replay(graphs, launch_ns, gpu_ns_and_1, 0)

    def _write_captures(self) -> None:
        """Write the rows of the entries that were captured since the last call."""
        for number, captures in self._open.items():
            entry = self._entries[number]
            memory = "" if captures.kib is None else captures.kib << 10
            self._captures(
                f"{entry.cells},{self._seconds(captures.began)},"
                f"{captures.took_ns / 1e9:.6f},{captures.graphs},{memory},"
                f"{entry.source},{entry.kind},{self.rank},{entry.part}"
            )
        self._open.clear()

    def _usage_row(self, entry: Entry) -> str:
        # Of an entry without a capture each graph counts as a replay.
        graphs = entry.graphs or 1
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
            entry.source,
            entry.part,
            entry.replayed_dummy // graphs,
            "" if entry.since_ns is None else self._seconds(entry.since_ns),
        )
        return ",".join(map(str, cells))

    def _seconds(self, time: int) -> str:
        return f"{(time - self._origin) / 1e9:.6f}"


def write_usage(folder: Folder, workers: Iterable[Worker]) -> None:
    """Write cuda_graph_usage.csv anew, whole or not at all; no file where it would have no row."""
    rows = sorted(row for worker in workers for row in worker.usage())
    if rows:
        content = "\n".join([f"{COLUMNS[USAGE_TABLE]}", *(row for _, row in rows), ""])
        folder.write(USAGE_TABLE, content.encode())


def _cells(values: Iterable[Any]) -> str:
    return ",".join("" if value is None else str(value) for value in values)


def _microseconds(nanoseconds: int) -> str:
    return str((nanoseconds + 500) // 1000)


_HANDLERS: dict[int, Callable[..., None]] = {
    Op.GRAPH: Worker._graph,
    Op.CAPTURE: Worker._captured,
    Op.BATCH: Worker._batch,
    Op.EXECUTION: Worker._executed,
    Op.REPLAY: Worker._replayed,
    Op.LOST: lambda *_: None,
}
