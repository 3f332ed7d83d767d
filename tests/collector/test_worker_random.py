# SPDX-License-Identifier: Apache-2.0
"""Any story of captures, executions and replays: the tables agree with a count of their own."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.collector.journals import (
    CAPTURES,
    TIMELINE,
    USAGE,
    Batch,
    WorkerJournal,
    make_tables,
    rows,
)

BATCHES: list[Batch] = [
    ("FULL", 8, 8, 1, 0),
    ("FULL", 16, 4, 1, 0),
    ("PIECEWISE", 16, None, 0, 0),
    ("PIECEWISE", 16, None, 0, 1),
]
PARTS = ("model", "drafter")
STEP = 10
"""Microseconds from one event to the next."""

captures = st.tuples(
    st.just("capture"),
    st.integers(0, len(BATCHES) - 1),
    st.integers(1, 4),
    st.sampled_from(("capture", "profiling")),
    st.sampled_from(PARTS),
)
executions = st.tuples(
    st.just("execute"),
    st.integers(0, 5),
    st.integers(1, 16),
    st.integers(0, 50_000),
    st.none() | st.integers(0, 50_000),
    st.integers(0, 1),
)
eager = st.tuples(st.just("eager"), st.integers(1, 2_000), st.integers(0, 1))
replays = st.tuples(st.just("replay"), st.integers(0, 5), st.integers(0, 50_000))
flushes = st.tuples(st.just("flush"))
stories = st.lists(captures | executions | eager | replays | flushes, max_size=40)


@dataclass
class Count:
    """What one entry should come to, in sums of what was done."""

    batch: Batch
    kind: str
    part: str
    graphs: int = 0
    took_us: int = 0
    kib: int = 0
    replays: int = 0
    dummies: int = 0
    launch_ns: int = 0
    gpu_ns: list[int] = field(default_factory=list)


class Story:
    """Writes a worker's journal, and counts beside it."""

    def __init__(self, sessions: Path, rank: int) -> None:
        self.worker = WorkerJournal(sessions, rank, gpu_timing=True)
        self.rank = rank
        self.now = rank
        self.entries: list[Count] = []
        self.executions: list[tuple[str, ...]] = []
        self.batches = Counter[Batch]()

    def do(self, what: str, *args: object) -> None:
        self.now += STEP
        getattr(self, f"_{what}")(*args)

    def _capture(self, batch: int, graphs: int, kind: str, part: str) -> None:
        entry = Count(BATCHES[batch], kind, part)
        self.entries.append(entry)
        number = len(self.entries)
        self.worker.graph(self.now, number, entry.batch, kind=kind, part=part)
        for piece in range(graphs):
            self.now += STEP
            self.worker.captured(self.now - piece, self.now, number, kib=piece)
            entry.took_us += piece
            entry.kib += piece
        entry.graphs = graphs

    def _execute(self, at: int, tokens: int, launch: int, gpu: int | None, dummy: int) -> None:
        if not self.entries:
            return
        number = at % len(self.entries) + 1
        entry = self.entries[number - 1]
        self.worker.executed(
            self.now, self._number(entry.batch), tokens, number, entry.graphs, launch, gpu, dummy
        )
        entry.replays += 1
        entry.dummies += dummy
        entry.launch_ns += launch
        entry.gpu_ns += [] if gpu is None else [gpu]
        self.executions.append((*self._row(entry.batch, tokens, dummy), str(entry.graphs)))

    def _eager(self, tokens: int, dummy: int) -> None:
        batch: Batch = ("NONE", tokens, None, 0, 0)
        self.worker.executed(self.now, self._number(batch), tokens, dummy=dummy)
        self.executions.append((*self._row(batch, tokens, dummy), "0"))

    def _replay(self, at: int, launch: int) -> None:
        if not self.entries:
            return
        number = at % len(self.entries) + 1
        entry = self.entries[number - 1]
        self.worker.replayed(self.now, number, entry.graphs, launch)
        entry.replays += 1
        entry.launch_ns += launch

    def _flush(self) -> None:
        self.worker.flush()

    def _number(self, batch: Batch) -> int:
        if batch not in self.batches:
            self.batches[batch] = len(self.batches) + 1
            self.worker.batch(self.now, self.batches[batch], batch)
        return self.batches[batch]

    def _row(self, batch: Batch, tokens: int, dummy: int) -> tuple[str, ...]:
        cells = [*batch, tokens, dummy, self.rank]
        return (f"{self.now / 1e6:.6f}", *("" if cell is None else str(cell) for cell in cells))


DESCRIPTOR = ("runtime_mode", "num_tokens", "num_reqs", "uniform", "has_lora")


@given(recorded=st.lists(stories, min_size=1, max_size=2))
def test_any_story_is_counted(recorded: list[list[tuple[object, ...]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stories = [Story(Path(folder), rank) for rank in range(len(recorded))]
        for story, operations in zip(stories, recorded, strict=True):
            for what, *args in operations:
                story.do(str(what), *args)
            story.worker.killed()
        tables = make_tables(stories[0].worker.folder, Path(folder) / "tables")
        check(stories, tables)


def check(stories: list[Story], tables: Path) -> None:
    assert sorted(captures_of(tables)) == sorted(
        (story.rank, entry.batch, entry.kind, entry.part, entry.graphs, entry.took_us, entry.kib)
        for story in stories
        for entry in story.entries
    )
    expected = []
    for story in stories:
        for entry in story.entries:
            if entry.replays or entry.kind == "capture":
                gpu = sum(entry.gpu_ns) if entry.gpu_ns or not entry.replays else None
                used = (entry.graphs, entry.replays, entry.dummies, entry.launch_ns // 1000)
                expected.append((story.rank, entry.part, entry.batch, *used, gpu and gpu // 1000))
    found = usage_of(tables)
    assert len(found) == len(expected)
    for row, wanted in zip(sorted(found, key=str), sorted(expected, key=str), strict=True):
        assert row[:6] == wanted[:6]
        # The table's last digit is rounded.
        for number, count in zip(row[6:], wanted[6:], strict=True):
            assert (number is None) == (count is None)
            assert number is None or 0 <= number - count <= 1
    timeline = timeline_of(tables)
    for story in stories:
        # What one worker wrote at a time stands together.
        assert [row for row in timeline if row[-2] == str(story.rank)] == story.executions


def batch_of(row: dict[str, str]) -> Batch:
    mode, *numbers = (row[name] for name in DESCRIPTOR)
    tokens, reqs, uniform, lora = (int(cell) if cell else None for cell in numbers)
    return mode, tokens, reqs, uniform, lora


def captures_of(tables: Path) -> list[tuple[object, ...]]:
    if not (tables / CAPTURES).exists():
        return []
    return [
        (
            int(row["worker"]),
            batch_of(row),
            row["kind"],
            row["part"],
            int(row["num_graphs"]),
            round(1e6 * float(row["duration_sec"])),
            int(row["memory_bytes"]) // 1024,
        )
        for row in rows(tables, CAPTURES)
    ]


def usage_of(tables: Path) -> list[tuple[object, ...]]:
    if not (tables / USAGE).exists():
        return []
    return [
        (
            int(row["worker"]),
            row["part"],
            batch_of(row),
            int(row["num_graphs"]),
            int(row["replay_count"]),
            int(row["dummy_count"]),
            round(1e6 * float(row["total_launch_sec"])),
            round(1e6 * float(row["total_gpu_sec"])) if row["total_gpu_sec"] else None,
        )
        for row in rows(tables, USAGE)
    ]


def timeline_of(tables: Path) -> list[tuple[str, ...]]:
    if not (tables / TIMELINE).exists():
        return []
    names = ("timestamp_sec", *DESCRIPTOR, "unpadded_tokens", "dummy", "worker", "num_graphs")
    return [tuple(row[name] for name in names) for row in rows(tables, TIMELINE)]
