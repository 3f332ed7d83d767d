# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading connector with a worker that copies by a clock.

It shares nothing with ``profilemate.simulation.host_memory``. It keeps an agenda of what each
direction has to copy, in the order in which a worker's methods are called by a model runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput


def connector(chunks: int, block_bytes: int, per_chunk: int = 1, **extra: Any) -> dict[str, Any]:
    """vLLM's arguments for host memory of so many chunks of ``per_chunk`` blocks; ``extra`` by the
    connector's names."""
    page = -(-block_bytes * per_chunk // 4096) * 4096
    given = {"cpu_bytes_to_use": chunks * page, "blocks_per_chunk": per_chunk, **extra}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": given,
    }


@dataclass
class Direction:
    """Copies in one direction: ``agenda`` has their numbers and ends, first come first served."""

    block_sec: float
    agenda: list[tuple[int, float]] = field(default_factory=list)
    last: float = 0.0
    blocks: int = 0

    def add(self, job: int, blocks: int, ready: float) -> None:
        self.last = max(self.last, ready) + blocks * self.block_sec
        self.agenda.append((job, self.last))
        self.blocks += blocks

    def take(self, now: float) -> list[int]:
        done = [job for job, end in self.agenda if end <= now + 1e-6]
        self.agenda = [(job, end) for job, end in self.agenda if job not in done]
        return done


class ClockedWorker:
    """Copies a block in ``block_sec``."""

    def __init__(self, block_sec: float) -> None:
        self.load, self.store = Direction(block_sec), Direction(block_sec)
        self.late: dict[int, int] = {}
        self.waiting: dict[int, str] = {}
        self.hits = 0
        self.report = KVConnectorOutput()

    def run(self, output: Any, launched: float, now: float, seconds: float) -> float:
        """Do what a runner has a worker do in a step of so many seconds, which the GPU can begin
        ``now``. Returns when the step is done; ``report`` is what the scheduler is told then."""
        asked = output.kv_connector_metadata
        began = self._before(asked, now)
        self.report = self._after(asked, launched if began == now else began, began + seconds)
        return began + seconds

    def _before(self, asked: Any, now: float) -> float:
        urgent = set(asked.jobs_to_flush or ())
        for job in sorted(urgent & set(asked.store_jobs)):
            self.late[job] = asked.store_jobs.pop(job).src_spec.block_ids.size
        if urgent:
            self._hand_over(now)
            ends = {**dict(self.store.agenda), **dict(self.load.agenda)}
            now = max([now, *(ends[job] for job in urgent if job in ends)])
        return now

    def _after(self, asked: Any, launched: float, end: float) -> KVConnectorOutput:
        stored, loaded = self.store.take(launched), self.load.take(launched)
        self._hand_over(end)
        for job, each in asked.load_jobs.items():
            self.load.add(job, each.dst_spec.block_ids.size, end)
            self.waiting[job] = each.req_id
        self.late |= {job: one.src_spec.block_ids.size for job, one in asked.store_jobs.items()}
        names = {self.waiting.pop(job) for job in loaded}
        counted = OffloadingWorkerMetadata(dict.fromkeys(stored + loaded, 1))
        return KVConnectorOutput(finished_recving=names, kv_connector_worker_meta=counted)

    def rest(self, told: Any, steps: list[Any], arrivals: list[float], now: float) -> float:
        """When the engine goes on: later, if these last steps neither compute anything, nor ask for
        copies, nor said that some are done. What the scheduler ``told`` is counted."""
        for each in told.values():
            stats = each.scheduler_stats and each.scheduler_stats.connector_prefix_cache_stats
            if stats:
                self.hits += stats.hits
        busy = any(step.total_num_scheduled_tokens for step in steps)
        asks = [step.kv_connector_metadata for step in steps[1:]]
        if busy or any(each.load_jobs or each.store_jobs for each in asks):
            return now
        if self.report.kv_connector_worker_meta.completed_jobs:
            return now
        ends = [end for way in (self.load, self.store) for _, end in way.agenda]
        times = [0.0] if self.late else [*ends, *arrivals]
        return max(now, min(times, default=now))

    def _hand_over(self, ready: float) -> None:
        for job, blocks in self.late.items():
            self.store.add(job, blocks, ready)
        self.late = {}
