# SPDX-License-Identifier: Apache-2.0
"""The figures of the session's whole run, for totals.json and kv_cache_summary.txt.

They are counted while events are applied and depend on nothing that the tables still have.
``saved`` and ``restore`` carry them through a restart of the collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from profilemate.collector.engine_totals import EngineTotals, Held, Sums
from profilemate.collector.worker_totals import WorkerTotals
from profilemate.format import totals


class Totals:
    """All engines and workers, each by its rank, and the last sample of each GPU."""

    def __init__(self) -> None:
        self.engines: dict[int, EngineTotals] = {}
        self.workers: dict[int, WorkerTotals] = {}
        self.gpus: dict[int, totals.Gpu] = {}
        self.held = Held()
        self._known: dict[str, Any] = {}
        """States of engines and workers that have not come yet, by ``e0``, ``w0`` and so on."""
        self._blocks_lost = False

    def engine(self, rank: int, pools: Sequence[int]) -> EngineTotals:
        """The figures of the engine of this rank, with pools of so many blocks."""
        found = EngineTotals(pools, self.held)
        self.engines[rank] = found
        state = self._known.pop(f"e{rank}", None)
        if state is not None:
            found.restore(state)
        return found

    def worker(self, rank: int) -> WorkerTotals:
        """The figures of the worker of this rank."""
        found = self.workers[rank] = WorkerTotals()
        state = self._known.pop(f"w{rank}", None)
        if state is not None:
            found.restore(state)
        return found

    def sampled(self, rows: Iterable[str]) -> None:
        """These rows of gpu_memory.csv came."""
        for row in rows:
            time, gpu, used, free, utilization = row.split(",")
            self.gpus[int(gpu)] = {
                "gpu": int(gpu),
                "sampled_sec": float(time),
                "used_bytes": int(used),
                "free_bytes": int(free),
                "utilization_pct": int(utilization) if utilization else None,
            }

    def lose_blocks(self) -> None:
        """What happens to the blocks of some engine is no longer recorded."""
        self._blocks_lost = True

    def fold(self) -> None:
        """Add up what waits."""
        for engine in self.engines.values():
            engine.fold()

    def summary(self) -> str | None:
        """The text of kv_cache_summary.txt; None where there are no blocks."""
        sums = [engine.sums for engine in self.engines.values()]
        of = Sums(*map(sum, zip(Sums(), *sums, strict=True)))
        if not of.total_blocks:
            return None
        lost = "The figures of blocks end early: see metadata.json, lost\n"
        lost = lost if self._blocks_lost else ""
        return (
            "KV Cache Statistics\n"
            f"{'=' * 50}\n\n"
            f"Total blocks available: {of.total_blocks}\n"
            f"Total allocations: {of.allocated}\n"
            f"Total deallocations: {of.freed}\n"
            f"Peak blocks used: {self.held.peak}\n"
            f"Peak usage: {100 * self.held.peak / of.total_blocks:.2f}%\n"
            f"Total evictions: {of.evicted}\n"
            f"Avg block lifetime: {of.lifetime_ns / max(1, of.with_lifetime) / 1e9:.2f}s\n"
            f"Avg idle before eviction: {of.idle_ns / max(1, of.with_idle) / 1e9:.2f}s\n"
            f"Total preemptions: {of.preemptions}\n"
            f"Finished requests: {of.ended}\n{lost}"
        )

    def saved(self) -> dict[str, Any]:
        """What ``restore`` takes; JSON keeps it exactly."""
        return {
            "known": {
                **self._known,
                **{f"e{rank}": engine.saved() for rank, engine in self.engines.items()},
                **{f"w{rank}": worker.saved() for rank, worker in self.workers.items()},
            },
            "gpus": list(self.gpus.values()),
            "held": [self.held.held, self.held.peak],
            "blocks_lost": self._blocks_lost,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was. Engines and workers may come before or after."""
        self._known = dict(state["known"])
        for rank, engine in self.engines.items():
            if f"e{rank}" in self._known:
                engine.restore(self._known.pop(f"e{rank}"))
        for rank, worker in self.workers.items():
            if f"w{rank}" in self._known:
                worker.restore(self._known.pop(f"w{rank}"))
        self.gpus = {gpu["gpu"]: gpu for gpu in state["gpus"]}
        self.held.held, self.held.peak = state["held"]
        self._blocks_lost = state["blocks_lost"]
