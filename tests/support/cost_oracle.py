# SPDX-License-Identifier: Apache-2.0
"""Watch inside vLLM what evictions, preemptions and held blocks cost, while it happens.

It sees what the analyzer does not: the pool's own map of cached blocks, the hashes of a request
when it is looked up, how many tokens were computed when it was preempted, for which request room
was needed, and every request's block table. Nothing of profilemate is used.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.watching import replaced


@dataclass
class Preempted:
    """A preemption: who, when (ns), tokens computed by then, and for which request.

    ``found``: tokens that it had when it ran again. ``back``: when as many were scheduled to be
    computed as there had been, None if it was not to be. ``takers``: for whom contents that it had
    held last were evicted while it waited.
    """

    request: str
    time: int
    computed: int
    needed_by: str
    found: int | None = None
    resumed: int | None = None
    back: int | None = None
    takers: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class CostOracle:
    """``regretted``: numbers of evictions whose content a first lookup missed later, with the
    requests that evicted and that missed it; ``evicted``: all of them by the evicting request.

    ``rent``: by request the blocks in its table times nanoseconds, before and after its first
    token. ``held``: blocks of the pool that anyone held, times nanoseconds.
    """

    def __init__(self) -> None:
        self.evicted: defaultdict[str, int] = defaultdict(int)
        self.regretted: dict[int, tuple[str, set[str]]] = {}
        self.recomputed_blocks: defaultdict[str, int] = defaultdict(int)
        self.preemptions: list[Preempted] = []
        self.rent: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.held = 0
        self._lost: dict[bytes, int] = {}
        self._evictors: list[str] = []
        self._missed: dict[str, list[int]] = {}
        self._asking = ""
        self._waiting: dict[str, Preempted] = {}
        self._recovering: dict[str, Preempted] = {}
        self._owners: dict[int, str] = {}
        self._tables: dict[str, int] = {}
        self._with_token: set[str] = set()
        self._pool_held = 0
        self._sampled = 0

    @contextmanager
    def watching(self) -> Iterator[CostOracle]:
        """Watch the one scheduler that is made from now on, until the block ends."""
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        with ExitStack() as stack:
            for owner, name, around in (
                (Scheduler, "schedule", self._schedule),
                (Scheduler, "update_from_output", self._update),
                (Scheduler, "_preempt_request", self._preempt),
                (KVCacheManager, "get_computed_blocks", self._lookup),
                (KVCacheManager, "allocate_slots", self._allocate),
                (KVCacheManager, "free", self._free),
                (BlockPool, "_maybe_evict_cached_block", self._evict),
            ):
                stack.enter_context(replaced(owner, name, around))
            yield self

    def _schedule(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        self._missed = {}
        output = original(scheduler, *args)
        now = time.monotonic_ns()
        for data in output.scheduled_new_reqs:
            for number in self._missed.get(data.req_id, ()):
                by = self.regretted.setdefault(number, (self._evictors[number], set()))
                by[1].add(data.req_id)
                self.recomputed_blocks[by[0]] += 1
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in cached.resumed_req_ids:
            preempted = self._waiting.pop(name)
            preempted.found, preempted.resumed = starts[name], now
            self._recovering[name] = preempted
        for name, preempted in list(self._recovering.items()):
            if name in output.num_scheduled_tokens:
                # Whole blocks, as blocks are what comes back.
                until = starts[name] + output.num_scheduled_tokens[name]
                if until // 16 >= preempted.computed // 16:
                    preempted.back = now
                    del self._recovering[name]
        return output

    def _update(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        results = original(scheduler, *args)
        for outputs in results.values():
            for result in outputs.outputs:
                if result.new_token_ids:
                    self._sample(None)
                    self._with_token.add(result.request_id)
        return results

    def _preempt(
        self, original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kw: Any
    ) -> Any:
        name = request.request_id
        self._recovering.pop(name, None)
        preempted = Preempted(name, time.monotonic_ns(), request.num_computed_tokens, self._asking)
        self.preemptions.append(preempted)
        self._waiting[name] = preempted
        return original(scheduler, request, *args, **kw)

    def _lookup(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        found = original(manager, request)
        if not request.skip_reading_prefix_cache and not request.num_preemptions:
            self._missed[request.request_id] = list(self._lost_blocks(manager, request, found[1]))
        return found

    def _lost_blocks(self, manager: Any, request: Any, hit: int) -> Iterator[int]:
        """The evictions because of which blocks of the prompt are missed now."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        pool = manager.block_pool
        size = pool.hash_block_size
        # The block that ends with the last token is never asked for.
        for index in range(hit // size, (request.num_tokens - 1) // size):
            content = make_block_hash_with_group_id(request.block_hashes[index], 0)
            cached = pool.cached_block_hash_to_block._cache.get(content)
            if cached is None and content in self._lost:
                yield self._lost[content]

    def _allocate(
        self, original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kw: Any
    ) -> Any:
        self._asking = request.request_id
        result = original(manager, request, *args, **kw)
        if result is not None:
            self._sample(manager, request.request_id)
            for block in _blocks_of(manager, request.request_id):
                self._owners[block.block_id] = request.request_id
        return result

    def _free(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        name = request.request_id
        blocks = _blocks_of(manager, name)
        result = original(manager, request)
        self._sample(manager, name)
        for block in blocks:
            if not block.ref_cnt:
                self._owners[block.block_id] = name
        return result

    def _evict(self, original: Callable[..., Any], pool: Any, block: Any) -> Any:
        content = block.block_hash
        result = original(pool, block)
        if content is not None:
            self.evicted[self._asking] += 1
            if pool.cached_block_hash_to_block._cache.get(content) is None:
                self._lost[content] = len(self._evictors)
            self._evictors.append(self._asking)
            waiting = self._waiting.get(self._owners.get(block.block_id, ""))
            if waiting is not None:
                waiting.takers[self._asking] += 1
        return result

    def _sample(self, manager: Any, *changed: str) -> None:
        """Time passed with the tables as they were; now some have changed."""
        now = time.monotonic_ns()
        passed = now - self._sampled
        if passed:
            self._sampled = now
            for name, count in self._tables.items():
                self.rent[name][name in self._with_token] += count * passed
            self.held += self._pool_held * passed
        for name in changed:
            self._tables[name] = len(_blocks_of(manager, name))
            if not self._tables[name]:
                del self._tables[name]
        if manager is not None:
            pool = manager.block_pool
            self._pool_held = pool.num_gpu_blocks - 1 - pool.free_block_queue.num_free_blocks


def _blocks_of(manager: Any, name: str) -> list[Any]:
    """The blocks in a request's tables."""
    return [
        block
        for tables in manager.coordinator.single_type_managers
        for block in tables.req_to_blocks.get(name, ())
        if not block.is_null
    ]
