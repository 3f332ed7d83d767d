# SPDX-License-Identifier: Apache-2.0
"""What would a worker copy to and from host memory, and when is it done?

Which blocks are kept, found and dropped is decided by the scheduler's half of vLLM's own offloading
connector. Its other half copies, in a worker, which a simulation does not have. This is that half,
as vLLM's copies for GPUs do it (``v1/kv_offload/cpu/gpu_worker.py``): in each direction one copy
after the other; none begins before the step is computed with which it was given to the GPU. What
is asked to be stored is given to it with the next step. Blocks that are taken away before they were
copied are copied first, and the step waits for that. A step reports what was done when it began.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.whatif.host_memory import CONNECTOR, HostMemory

TICK_SEC = 1e-6


def arguments(memory: HostMemory | None, num_blocks: int) -> dict[str, Any]:
    """What ``parts.build_scheduler`` needs for host memory; nothing without any."""
    if memory is None:
        return {}
    return {
        # One worker stands for all of them.
        "pool_bytes": memory.block_bytes * memory.copies * num_blocks,
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": memory.total_bytes,
                "blocks_per_chunk": memory.chunk_blocks,
                "offload_prompt_only": memory.prompts_only,
                "eviction_policy": memory.policy,
                "store_threshold": memory.store_threshold,
            },
        },
    }


@dataclass
class Moved:
    """What was copied while it counts: ``loaded_tokens`` in place of being computed, bytes of all
    GPUs, and how long the copies back took."""

    loaded_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_sec: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.loaded_tokens + other.loaded_tokens,
            self.loaded_bytes + other.loaded_bytes,
            self.stored_bytes + other.stored_bytes,
            self.load_sec + other.load_sec,
        )


@dataclass(frozen=True)
class Copy:
    """A job of the connector's on its way. ``request``: that waits for it; None: it is a store."""

    job: int
    end: float
    request: str | None


class Transfers:
    """The copies of one engine.

    Args:
        memory: the host memory.
        scheduler: vLLM's, with the connector.

    """

    def __init__(self, memory: HostMemory, scheduler: Any) -> None:
        self.moved = Moved()
        self.counts = True
        self._memory = memory
        self._scheduler = scheduler
        self._given: list[tuple[int, int]] = []
        self._on_the_way: list[Copy] = []
        self._free_sec = {"load": 0.0, "store": 0.0}
        self._found: dict[str, tuple[int, int]] = {}
        self.has_reported = False
        """Whether the last step said that copies were done: the next one may find more to do."""
        self._watch(scheduler.connector)

    def _watch(self, connector: Any) -> None:
        """Note of each lookup what the pool and the host memory had."""
        match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        in_pool: dict[str, int] = {}

        def matched(request: Any, tokens: int) -> Any:
            in_pool[request.request_id] = int(tokens)
            return match(request, tokens)

        def taken(request: Any, blocks: Any, tokens: int) -> Any:
            name = request.request_id
            # After a load the request is allocated again, with nothing found.
            if tokens or name not in self._found:
                self._found[name] = in_pool.get(name, 0), int(tokens)
                self.moved.loaded_tokens += int(tokens) * self.counts
            return allocated(request, blocks, tokens)

        connector.get_num_new_matched_tokens = matched
        connector.update_state_after_alloc = taken

    def found(self, name: str, tokens: int) -> tuple[int, int]:
        """Of the tokens that a request had when it was admitted, those from the pool and those from
        host memory. The last token of a prompt is always computed, though it may be loaded."""
        pool, host = self._found.pop(name, (tokens, 0))
        return (pool, host) if host else (tokens, 0)

    def forget(self, name: str) -> None:
        """The request ran, or has gone: its next lookup is another one."""
        self._found.pop(name, None)

    @property
    def is_busy(self) -> bool:
        """Whether the engine has to go on for its copies, though no request may run."""
        return bool(self._scheduler.has_requests())

    @property
    def next_sec(self) -> float | None:
        """When the next copy is done; None where nothing is on the way, or given to a worker."""
        if self._given:
            return 0.0
        return min((copy.end for copy in self._on_the_way), default=None)

    def step(
        self, metadata: Any, *, launched: float, begin: float, seconds: float
    ) -> tuple[float, Any]:
        """Do what a worker does in one step.

        Args:
            metadata: the connector's, of the step.
            launched: when the step was scheduled.
            begin: when the step before it was done.
            seconds: what it computes for.

        Returns:
            when the step is done, and what the worker reports; None where that is nothing

        """
        stores = dict(metadata.store_jobs)
        flushed = metadata.jobs_to_flush or ()
        began = self._flush(stores, flushed, begin)
        done = self._done(launched if began == begin else began)
        end = began + seconds
        self._give(end)
        for job, each in metadata.load_jobs.items():
            blocks = len(each.dst_spec.block_ids)
            taken = self._copy("load", job, blocks, end, each.req_id)
            self.moved.loaded_bytes += self._bytes(blocks) * self.counts
            self.moved.load_sec += taken * self.counts
        self.has_reported = bool(done)
        self._given += [(job, len(each.src_spec.block_ids)) for job, each in stores.items()]
        return end, _reported(done)

    def _flush(self, stores: dict[int, Any], jobs: Any, begin: float) -> float:
        """Copy what has to be copied before the step; returns when it can begin."""
        for job in jobs:
            each = stores.pop(job, None)
            if each is not None:
                self._given.append((job, len(each.src_spec.block_ids)))
        if not jobs:
            return begin
        # A worker gives all that is left over from the step before to the GPU here.
        self._give(begin)
        ends = [copy.end for copy in self._on_the_way if copy.job in jobs]
        return max([begin, *ends])

    def _give(self, at: float) -> None:
        for job, blocks in self._given:
            self._copy("store", job, blocks, at, None)
            self.moved.stored_bytes += self._bytes(blocks) * self.counts
        self._given = []

    def _copy(self, way: str, job: int, blocks: int, at: float, request: str | None) -> float:
        seconds = blocks * self._memory.block_bytes / self._memory.bytes_per_sec
        end = self._free_sec[way] = max(self._free_sec[way], at) + seconds
        self._on_the_way.append(Copy(job, end, request))
        return seconds

    def _bytes(self, blocks: int) -> int:
        return blocks * self._memory.block_bytes * self._memory.copies

    def _done(self, now: float) -> list[Copy]:
        done = [copy for copy in self._on_the_way if copy.end <= now + TICK_SEC]
        self._on_the_way = [copy for copy in self._on_the_way if copy.end > now + TICK_SEC]
        return done

    def until(self, now: float, others: Iterable[float]) -> float | None:
        """When an engine that has nothing to compute goes on: as the next copy is done, or before
        that at one of the other times; None where there is no copy to wait for."""
        soonest = self.next_sec
        if soonest is None:
            return None
        later = [time for time in others if now < time < np.inf]
        return max(now, min([soonest, *later]))


def _reported(done: list[Copy]) -> Any:
    if not done:
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata,
    )
    from vllm.v1.outputs import KVConnectorOutput

    return KVConnectorOutput(
        finished_recving={copy.request for copy in done if copy.request is not None} or None,
        kv_connector_worker_meta=OffloadingWorkerMetadata(
            completed_jobs={copy.job: 1 for copy in done}
        ),
    )
