# SPDX-License-Identifier: Apache-2.0
"""Watch inside vLLM why each block of a prompt is missed, at the moment of its lookup.

It sees what the analyzer does not: the pool's own map of cached blocks, the requests that run,
and the hash of every block at the time. Nothing of profilemate is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.watching import replaced


@dataclass
class Missed:
    """The missed full blocks of one request: ``reasons`` by index.

    ``evictions``: by index, of the first group, the request that evicted the content, nanoseconds
    before the lookup, and blocks that the pool handed out from that eviction on until the lookup.
    ``computing``: by index, the requests that were computing the content.
    """

    reasons: dict[int, str] = field(default_factory=dict)
    evictions: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    computing: dict[int, frozenset[str]] = field(default_factory=dict)


class MissOracle:
    """``missed``: by request id, what the lookup that admitted it missed."""

    def __init__(self) -> None:
        self.missed: dict[str, Missed] = {}
        self._pending: dict[str, Missed] = {}
        self._scheduler: Any = None
        self._ever: set[bytes] = set()
        self._evictions: dict[bytes, tuple[str, int, int]] = {}
        self._handed_out = 0
        self._asking = ""

    @contextmanager
    def watching(self) -> Iterator[MissOracle]:
        """Watch the one scheduler that is made from now on, until the block ends."""
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        with ExitStack() as stack:
            for owner, name, around in (
                (Scheduler, "schedule", self._schedule),
                (KVCacheManager, "get_computed_blocks", self._lookup),
                (KVCacheManager, "allocate_slots", self._allocate_slots),
                (BlockPool, "get_new_blocks", self._get_new_blocks),
                (BlockPool, "_maybe_evict_cached_block", self._evict),
                (BlockPool, "cache_full_blocks", self._cache),
                (BlockPool, "reset_prefix_cache", self._reset),
            ):
                stack.enter_context(replaced(owner, name, around))
            yield self

    def _schedule(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        self._scheduler = scheduler
        self._pending = {}
        output = original(scheduler, *args)
        for data in output.scheduled_new_reqs:
            if data.req_id in self._pending:
                self.missed[data.req_id] = self._pending[data.req_id]
        return output

    def _lookup(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        found = original(manager, request)
        if not request.skip_reading_prefix_cache and not request.num_preemptions:
            self._pending[request.request_id] = self._why(manager, request, found[1])
        return found

    def _why(self, manager: Any, request: Any, hit: int) -> Missed:
        size = manager.block_pool.hash_block_size
        missed, full = Missed(), request.num_tokens // size
        for index in range(hit // size, full):
            content = request.block_hashes[index]
            running = frozenset(
                other.request_id
                for other in self._scheduler.running
                if other is not request and content in other.block_hashes
            )
            missed.reasons[index] = self._reason(
                manager.block_pool, request, index, content, running, first=index == hit // size
            )
            if missed.reasons[index] == "capacity":
                who, when, handed_out = self._evictions[content]
                missed.evictions[index] = (
                    who,
                    time.monotonic_ns() - when,
                    self._handed_out - handed_out,
                )
            if missed.reasons[index] == "not yet cached":
                missed.computing[index] = running
        return missed

    def _reason(
        self,
        pool: Any,
        request: Any,
        index: int,
        content: bytes,
        running: frozenset[str],
        *,
        first: bool,
    ) -> str:
        if (index + 1) * pool.hash_block_size == request.num_tokens:
            return "last token"
        if pool.get_cached_block(content, [0]) is not None:
            return "held back" if first else "behind"
        if running:
            return "not yet cached"
        return "capacity" if content in self._ever else "compulsory"

    def _allocate_slots(
        self, original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._asking = request.request_id
        try:
            return original(manager, request, *args, **kwargs)
        finally:
            self._asking = ""

    def _get_new_blocks(self, original: Callable[..., Any], pool: Any, count: int) -> Any:
        blocks = original(pool, count)
        self._handed_out += count
        return blocks

    def _evict(self, original: Callable[..., Any], pool: Any, block: Any) -> Any:
        content = block.block_hash
        result = original(pool, block)
        if content is not None and pool.cached_block_hash_to_block.get_one_block(content) is None:
            self._gone(content)
        return result

    def _gone(self, content: bytes) -> None:
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        if get_group_id(content) != 0:
            return
        self._evictions[get_block_hash(content)] = (
            self._asking,
            time.monotonic_ns(),
            self._handed_out,
        )

    def _cache(self, original: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(pool, *args, **kwargs)
        names = original.__code__.co_varnames[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        self._ever.update(given["request"].block_hashes[: given["num_full_blocks"]])
        return result

    def _reset(self, original: Callable[..., Any], pool: Any) -> Any:
        contents = [block.block_hash for block in pool.blocks if block.block_hash is not None]
        done = original(pool)
        if done:
            for content in contents:
                self._gone(content)
        return done
