# SPDX-License-Identifier: Apache-2.0
"""A session with an engine and a worker on a GPU, so that every metric has a value."""

from __future__ import annotations

from pathlib import Path

from profilemate.collector.follow import Follower
from profilemate.format import totals
from profilemate.format.folder import Folder
from profilemate.format.totals import RunTotals
from tests.collector.journals import EngineJournal, WorkerJournal
from tests.collector.test_following import write_story


class Samples:
    """Stands in for the thread that samples GPUs."""

    def __init__(self) -> None:
        self._rows = ["0.500000,0,1000,3000,50", "1.500000,0,2000,2000,75", "1.500000,1,5,6,"]

    def watch(self, workers: object) -> None:
        """All is there already."""

    def rows(self) -> list[str]:
        rows, self._rows = self._rows, []
        return rows

    def state(self) -> object:
        from profilemate.collector.gpu_memory import Sampling

        return Sampling({}, None)

    def stop(self) -> None:
        """Nothing runs."""


def recorded(folder: Path) -> Path:
    """A session's folder with its tables and totals."""
    engine = EngineJournal(folder)
    engine.allocated(1_000_000, 1, 2)
    engine.allocated(2_000_000, 3)
    engine.status(lost={"requests": {"tables": "requests.jsonl", "reason": "a test"}})
    engine.killed()
    worker = WorkerJournal(folder, 3)
    write_story(worker, 60)
    # vLLM chose a graph, and replayed none.
    worker.batch(3_000_000, 50, ("PIECEWISE", 8, None, 0, 0))
    worker.executed(3_000_000, 50, tokens=7)
    worker.killed()
    session = engine.folder
    follower = Follower(session, session, Samples())  # type: ignore[arg-type]
    follower.discover()
    while follower.read():
        follower.apply()
    follower.lags(2_500_000_000)
    follower.lags(500_000_000)
    follower.sample()
    follower.close()
    return session


def totals_of(session: Path) -> RunTotals:
    """Its totals.json, as the command reads it."""
    with Folder.anyones(session) as folder:
        return totals.read(folder)
