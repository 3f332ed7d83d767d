# SPDX-License-Identifier: Apache-2.0
"""Record what is done with CUDA graphs, and read the journal back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from profilemate.collector.decode import Shape, episodes
from profilemate.collector.journal_reader import JournalReader
from profilemate.format.events import More, Op
from profilemate.format.journal import Kind
from profilemate.hooks.gpu import executions, graphs
from profilemate.hooks.gpu.gpu_timer import GpuTimer
from profilemate.record.recorder import Recorder

Batch = tuple[str, int, int | None, int, int]
"""Mode, tokens with padding, requests, uniform, has_lora."""


class Execution(NamedTuple):
    """One execution. ``tokens`` are those without padding; ``graphs`` counts replays."""

    batch: Batch
    tokens: int
    graphs: int
    dummy: int = 0


class Entry(NamedTuple):
    """What one capture of a batch made; ``batch`` is None where that is not known."""

    batch: Batch | None
    source: str
    kind: str = "capture"
    part: str = "model"


@dataclass
class Recorded:
    """What a journal says.

    ``captures`` has the number of the entry of each graph and what it took in KiB, None where that
    is not known; ``replays`` the entry's number and the graphs, of those outside executions;
    ``times`` what executions took to launch, and on the GPU if that was measured, in nanoseconds;
    ``order`` when they ended; ``turns`` the pauses, and what ended them.
    """

    entries: dict[int, Entry] = field(default_factory=dict)
    captures: list[tuple[int, int | None]] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    replays: list[tuple[int, int]] = field(default_factory=list)
    times: list[tuple[int, int | None]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    turns: list[Op] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    replayed_entries: list[int] = field(default_factory=list)

    def graphs_of(self, number: int) -> int:
        """How many CUDA graphs an entry has."""
        return [entry for entry, _ in self.captures].count(number)


class Recording:
    """Records one worker, whose ``torch.cuda.CUDAGraph`` is the class that is given."""

    def __init__(self, journal: Path, graph_class: Any, cuda: Any = None) -> None:
        self.journal = journal
        fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.recorder = Recorder(fd, {"producer": "worker", "rank": 0}, journal.stem)
        self.graphs = graphs.Graphs(self.recorder, GpuTimer(cuda) if cuda is not None else None)
        graphs.watch(self.graphs, graph_class)

    def watch(self, runner: Any) -> None:
        """Record this model runner's executions too."""
        executions.watch(runner, executions.Executions(self.graphs))

    def end(self) -> Recorded:
        """End it as a worker's end does; returns what was recorded."""
        if self.recorder.active:
            self.graphs.close()
        self.recorder.close()
        return read(self.journal)


def read(journal: Path) -> Recorded:
    """What is in a journal by now."""
    found = Recorded()
    batches: dict[int, Batch] = {}
    for op, event in _events(journal, found):
        if op == Op.GRAPH:
            *batch, source, kind, part = json.loads(event[2])
            assert event[1] == len(found.entries) + 1
            known = None if batch == [None] * 5 else tuple(batch)
            found.entries[event[1]] = Entry(known, source, kind, part)
        elif op == Op.BATCH:
            assert event[1] not in batches
            batches[event[1]] = tuple(json.loads(event[2]))
        elif op == Op.CAPTURE:
            ended, began, entry, kib = event
            assert began <= ended
            found.captures.append((entry, kib - 1 if kib else None))
        elif op == Op.EXECUTION:
            ended, batch, tokens, entry, replayed, launch, gpu, dummy = event
            executed = batches[batch] if batch else found.entries[entry].batch
            assert executed is not None
            found.executions.append(Execution(executed, tokens, replayed, dummy))
            found.replayed_entries.append(entry)
            found.times.append((launch, gpu - 1 if gpu else None))
            found.order.append(ended)
        elif op in (Op.PAUSE, Op.RESUME):
            found.turns.append(Op(op))
        elif op != Op.LOST:
            assert op == Op.REPLAY
            found.replays.append((event[1], event[2]))
    return found


def more(journal: Path, kind: More) -> list[Any]:
    """The values of the journal's events of this kind."""
    events = (event for op, event in _events(journal, Recorded()) if op == Op.MORE)
    return [json.loads(blob) for _, number, blob in events if number == kind]


def _events(journal: Path, found: Recorded) -> Iterator[tuple[int, Any]]:
    reader = JournalReader(journal)
    while frames := reader.read():
        for kind, payload, _ in frames:
            if kind is Kind.EVENTS:
                for episode in episodes(payload, Shape(0, 0), lambda _: []):
                    yield from zip(episode.ops, episode.events, strict=True)
            elif kind is not Kind.HEADER:
                found.status |= json.loads(payload)
    assert reader.offset == journal.stat().st_size
    reader.close()
