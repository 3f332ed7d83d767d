# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading connector with a worker that copies by a clock.

It shares nothing with ``profilemate.simulation.host_memory``. It keeps an agenda of what each
direction has to copy, in the order in which a worker's methods are called by a model runner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput

GIB = 2**30


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
        self.queries = 0

    def before(self, metadata: Any, now: float) -> float:
        """What a runner does before a step is computed: returns when that begins."""
        urgent = set(metadata.jobs_to_flush or ())
        for job in sorted(urgent & set(metadata.store_jobs)):
            self.late[job] = metadata.store_jobs.pop(job).src_spec.block_ids.size
        if urgent:
            self._hand_over(now)
            ends = {**dict(self.store.agenda), **dict(self.load.agenda)}
            now = max([now, *(ends[job] for job in urgent if job in ends)])
        return now

    def after(self, metadata: Any, launched: float, end: float) -> KVConnectorOutput:
        """What it does when a step was launched, which is computed at ``end``."""
        stored, loaded = self.store.take(launched), self.load.take(launched)
        self._hand_over(end)
        for job, each in metadata.load_jobs.items():
            self.load.add(job, each.dst_spec.block_ids.size, end)
            self.waiting[job] = each.req_id
        self.late |= {job: one.src_spec.block_ids.size for job, one in metadata.store_jobs.items()}
        names = {self.waiting.pop(job) for job in loaded}
        counted = OffloadingWorkerMetadata({job: 1 for job in stored + loaded})
        return KVConnectorOutput(finished_recving=names, kv_connector_worker_meta=counted)

    def count(self, told: Any) -> None:
        """Add up what the scheduler counts of the connector, in tokens."""
        for each in told.values():
            stats = each.scheduler_stats and each.scheduler_stats.connector_prefix_cache_stats
            if stats:
                self.hits += stats.hits
                self.queries += stats.queries

    def is_busy_with(self, step: Any) -> bool:
        """Whether a scheduled step computes anything, or asks for copies."""
        asked = step.kv_connector_metadata
        return bool(step.total_num_scheduled_tokens or asked.load_jobs or asked.store_jobs)

    def has_told(self, report: KVConnectorOutput) -> bool:
        """Whether a report says that anything is done."""
        return bool(report.kv_connector_worker_meta.completed_jobs)

    def _hand_over(self, ready: float) -> None:
        for job, blocks in self.late.items():
            self.store.add(job, blocks, ready)
        self.late = {}

    @property
    def next_sec(self) -> float:
        """When there is something to tell, or to hand over; infinite if never."""
        if self.late:
            return 0.0
        return min([end for way in (self.load, self.store) for _, end in way.agenda], default=math.inf)
