# SPDX-License-Identifier: Apache-2.0
"""Journals of workers and engines, written event by event, and the tables that come of them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from profilemate.collector.follower import Follower
from profilemate.format.events import Op
from profilemate.record import encode
from profilemate.record.claim import claim
from profilemate.record.recorder import Recorder

NAME = "session_20260131_120000_4711_c0ffee"

CAPTURES = "cuda_graph_captures.csv"
USAGE = "cuda_graph_usage.csv"
TIMELINE = "cuda_graph_timeline.csv"
MEMORY = "gpu_memory.csv"
OF_WORKERS = (CAPTURES, USAGE, TIMELINE, MEMORY)

Batch = tuple[str | None, int | None, int | None, int | None, int | None]


class Journal:
    """The journal of a process that is gone before anybody reads it. Times are microseconds since
    the session began.
    """

    def __init__(self, sessions: Path, name: str, header: dict[str, Any]) -> None:
        place = claim(sessions, NAME, name)
        self.folder = place.directory
        self.path = place.journal
        self._origin = place.founding.origin_ns
        # No process with this number began at boot.
        process = {"pid": os.getpid(), "start": "0", "hooks": [], "versions": {"vllm": "0.33.0"}}
        # It begins when the session does, before all of its events. No two begin in the very same
        # nanosecond.
        with patch("time.monotonic_ns", return_value=self._origin + header["rank"]):
            self.recorder = Recorder(place.fd, {**process, **header}, name)
        self.keep = self.recorder.keep

    def at(self, microseconds: int) -> int:
        return self._origin + 1000 * microseconds

    def flush(self) -> None:
        self.recorder.flush()

    def killed(self) -> None:
        """The process is gone: nothing more is written, not even its end."""
        self.recorder.flush()
        self.recorder.forget()

    def status(self, **changes: Any) -> None:
        self.recorder.status(**changes)


class WorkerJournal(Journal):
    """A worker's journal."""

    def __init__(self, sessions: Path, rank: int = 0, **header: Any) -> None:
        facts = {"producer": "worker", "rank": rank, "engine": 0, "gpu": None, "gpu_timing": False}
        super().__init__(sessions, f"worker{rank}", {**facts, **header})

    def graph(
        self,
        at: int,
        number: int,
        batch: Batch,
        source: str = "CUDAGraphWrapper",
        kind: str = "capture",
        part: str = "model",
    ) -> None:
        self._blob(Op.GRAPH, at, number, [*batch, source, kind, part])

    def captured(self, began: int, ended: int, number: int, kib: int | None) -> None:
        fields = number, 0 if kib is None else kib + 1
        self.keep((encode.between, Op.CAPTURE, self.at(began), self.at(ended), fields))

    def batch(self, at: int, number: int, batch: Batch) -> None:
        self._blob(Op.BATCH, at, number, list(batch))

    def executed(
        self,
        at: int,
        batch: int,
        tokens: int,
        entry: int = 0,
        graphs: int = 0,
        launch_ns: int = 0,
        gpu_ns: int | None = None,
        dummy: int = 0,
    ) -> None:
        gpu = 0 if gpu_ns is None else gpu_ns + 1
        fields = batch, tokens, entry, graphs, launch_ns, gpu, dummy
        self.keep((encode.once, Op.EXECUTION, self.at(at), fields))

    def replayed(
        self, at: int, entry: int, graphs: int, launch_ns: int = 0, gpu_ns: int | None = None
    ) -> None:
        fields = entry, graphs, launch_ns, 0 if gpu_ns is None else gpu_ns + 1
        self.keep((encode.once, Op.REPLAY, self.at(at), fields))

    def _blob(self, op: Op, at: int, number: int, fields: list[Any]) -> None:
        self.keep((encode.blob, op, self.at(at), number, json.dumps(fields).encode()))


class EngineJournal(Journal):
    """An engine's journal, of steps that allocate blocks."""

    def __init__(self, sessions: Path, rank: int = 0, **header: Any) -> None:
        facts = {
            "producer": "engine",
            "rank": rank,
            "pools": [{"blocks": 11, "null": 0}],
            "groups": [{"kind": "FullAttentionSpec", "block_size": 16, "pool": 0}],
            "caching": True,
            "hash_block_size": 16,
            "told_by_content": 16,
            "cache": {"max_model_len": 32},
            "parallel": {"tensor": 2, "pipeline": 1, "data": 1},
        }
        super().__init__(sessions, f"engine{rank}", {**facts, **header})
        self._free = 10

    def allocated(self, at: int, *blocks: int) -> None:
        """One step that hands out these blocks, to no known request."""
        self._free -= len(blocks)
        time, handed_out = self.at(at), [SimpleNamespace(block_id=block) for block in blocks]
        self.keep((encode.blocks, Op.ALLOCATE, time, *handed_out))
        running, waiting, tokens, prefill, scheduled = 1, 0, 16, 16, 1
        fields = running, waiting, tokens, prefill, scheduled, self._free
        self.keep((encode.between, Op.STEP, time, time, fields))


def make_tables(folder: Path, target: Path) -> Path:
    """The tables of a session, in ``target``; its journals stay."""
    target.mkdir()
    follower = Follower(folder, target)
    follower.discover()
    while follower.read():
        follower.apply()
    follower.close()
    return target


def tables_of(journal: Journal) -> Path:
    """The tables of the journal's session, whose only process is gone."""
    journal.killed()
    return make_tables(journal.folder, journal.folder / "tables")


def lines(folder: Path, table: str) -> list[str]:
    """A table's rows as they are, without the header."""
    path = folder / table
    return path.read_text().splitlines()[1:] if path.exists() else []


def rows(folder: Path, table: str) -> list[dict[str, str]]:
    """A table's rows by column."""
    with (folder / table).open(newline="") as file:
        return list(csv.DictReader(file))


def metadata(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metadata.json").read_bytes())
    return content


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The tables of workers that there are, byte for byte."""
    return {name: (folder / name).read_bytes() for name in OF_WORKERS if (folder / name).exists()}
