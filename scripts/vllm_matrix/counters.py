# SPDX-License-Identifier: Apache-2.0
"""What happened to the blocks of a pool, counted at the blocks themselves?

profilemate hooks the methods of pools, managers and schedulers. This counts where all of those
end: in the reference count and the hash of each block, whoever changes them. A block without a
hash that gets its first reference was handed out, one with a hash was found by a prefix hit.
Of the methods, only one is looked at, for whom blocks are taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

State = tuple[int, int, int, float]
"""Blocks held, free with a content, free without, and the pool's own usage in percent."""


@dataclass
class Counts:
    """Blocks, by what happened to them.

    ``evicted`` has the ids of blocks that lost a content, in order. ``reused_by`` counts by
    request the blocks that a prefix hit found. ``states`` are those of the pool at the ends of
    the scheduler's half steps, each told once.
    """

    allocated: int = 0
    reused: int = 0
    freed: int = 0
    cached: int = 0
    evicted: list[int] = field(default_factory=list)
    reused_by: dict[str, int] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)


class Watch:
    """Counts while ``watching()``, in whatever pool's blocks change."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._pools: list[Any] = []
        self._nulls: set[int] = set()
        self._request = ""

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Count what happens from now on, until the block ends."""
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        allocate = KVCacheManager.allocate_slots

        def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            self._request = request.request_id
            try:
                return allocate(manager, request, *args, **kwargs)
            finally:
                self._request = ""

        before = {name: vars(KVCacheBlock)[name] for name in ("ref_cnt", "_block_hash")}
        try:
            KVCacheBlock.ref_cnt = _observed(before["ref_cnt"], "ref_cnt", self._referenced)
            KVCacheBlock._block_hash = _observed(before["_block_hash"], "_block_hash", self._hashed)
            KVCacheManager.allocate_slots = allocate_slots
            yield self
        finally:
            KVCacheManager.allocate_slots = allocate
            for name, attribute in before.items():
                setattr(KVCacheBlock, name, attribute)

    def begin(self, pools: list[Any]) -> None:
        """Count anew, in these pools, which have handed out nothing yet."""
        self.counts = Counts()
        self._pools = pools
        self._nulls = {id(pool.null_block) for pool in pools}

    def look(self) -> None:
        """Note the state that the pool is in, unless it is that of the last look."""
        (pool,) = self._pools
        free = pool.free_block_queue.get_all_free_blocks()
        cached = sum(block.block_hash is not None for block in free)
        held = pool.num_gpu_blocks - 1 - len(free)
        state = (held, cached, len(free) - cached, 100 * pool.get_usage())
        if self.counts.states[-1:] != [state]:
            self.counts.states.append(state)

    def _referenced(self, block: Any, before: int, after: int) -> None:
        if id(block) in self._nulls:
            return
        if after > before:
            if block.block_hash is None:
                self.counts.allocated += 1
            else:
                self.counts.reused += 1
                reused_by = self.counts.reused_by
                reused_by[self._request] = reused_by.get(self._request, 0) + 1
        elif before > 0 == after:
            self.counts.freed += 1

    def _hashed(self, block: Any, before: Any, after: Any) -> None:
        if before is None and after is not None:
            self.counts.cached += 1
        elif before is not None and after is None:
            self.counts.evicted.append(block.block_id)


def _observed(attribute: Any, name: str, changed: Callable[[Any, Any, Any], None]) -> property:
    """A property in the place of a field of a dataclass, with slots or without."""
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    if inspect.ismemberdescriptor(attribute):
        read, write = attribute.__get__, attribute.__set__
    else:
        read, write = attrgetter(f"_seen_{name}"), partial(_set, f"_seen_{name}")

    def update(block: Any, value: Any) -> None:
        try:
            before = read(block)
        except AttributeError:
            # It was never written: the block is being made.
            before = value
        write(block, value)
        if value != before:
            changed(block, before, value)

    return property(read, update)


def _set(name: str, block: Any, value: Any) -> None:
    setattr(block, name, value)
