# SPDX-License-Identifier: Apache-2.0
"""What happened to the blocks of a pool, counted at the blocks themselves?

profilemate hooks the methods of pools, managers and schedulers. This counts where all of those
end: in the reference count and the hash of each block, whoever changes them. A block without a
hash that gets its first reference was handed out, one with a hash was found by a prefix hit.
Methods are looked at where a change does not say what it means: for whom blocks are taken, whether
a hash moves to another block that holds the same, or makes way for that of a longer content.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from tests.support.watching import replaced

State = tuple[int, int, int, float]
"""Blocks held, free with a content, free without, and the pool's own usage in percent."""

_MOVE = "move_block_hashes"
_CACHE = ("cache_full_blocks", "cache_partial_block")


@dataclass
class Counts:
    """Blocks of one pool, by what happened to them.

    ``evicted`` has the ids of blocks that lost a content, in order. ``states`` are those of the
    pool at the ends of the scheduler's half steps, each once.
    """

    allocated: int = 0
    reused: int = 0
    freed: int = 0
    cached: int = 0
    evicted: list[int] = field(default_factory=list)
    states: list[State] = field(default_factory=list)


class Watch:
    """Counts while ``watching()``. ``counts`` has those of each pool, and ``reused_by`` by request
    the blocks that a prefix hit found."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []
        self.reused_by: dict[str, int] = {}
        self._pools: list[Any] = []
        self._counted: dict[int, Counts] = {}
        """By a block's id(), its pool's; null blocks are left out."""
        self._request = ""
        self._inside = ""

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Count what happens from now on, until the block ends."""
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        def allocate_slots(
            original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._request = request.request_id
            try:
                return original(manager, request, *args, **kwargs)
            finally:
                self._request = ""

        def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._inside = original.__name__
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = ""

        before = {name: vars(KVCacheBlock)[name] for name in ("ref_cnt", "_block_hash")}
        with ExitStack() as stack:
            stack.enter_context(replaced(KVCacheManager, "allocate_slots", allocate_slots))
            for name in (_MOVE, *_CACHE):
                if hasattr(BlockPool, name):
                    stack.enter_context(replaced(BlockPool, name, noted))
            try:
                KVCacheBlock.ref_cnt = _observed(before["ref_cnt"], "ref_cnt", self._referenced)
                KVCacheBlock._block_hash = _observed(
                    before["_block_hash"], "_block_hash", self._hashed
                )
                yield self
            finally:
                for name, attribute in before.items():
                    setattr(KVCacheBlock, name, attribute)

    def begin(self, pools: list[Any]) -> None:
        """Count anew, in these pools, which have handed out nothing yet."""
        self.counts = [Counts() for _ in pools]
        self.reused_by = {}
        self._pools = pools
        self._counted = {
            id(block): counts
            for pool, counts in zip(pools, self.counts, strict=True)
            for block in pool.blocks
            if block is not pool.null_block
        }

    def look(self) -> None:
        """Note the state that each pool is in, unless it is that of the last look."""
        for pool, counts in zip(self._pools, self.counts, strict=True):
            free = pool.free_block_queue.get_all_free_blocks()
            cached = sum(block.block_hash is not None for block in free)
            held = pool.num_gpu_blocks - 1 - len(free)
            state = (held, cached, len(free) - cached, 100 * pool.get_usage())
            if counts.states[-1:] != [state]:
                counts.states.append(state)

    def _referenced(self, block: Any, before: int, after: int) -> None:
        counts = self._counted.get(id(block))
        if counts is None:
            return
        if after > before:
            if block.block_hash is None:
                # 0.30 pins a held block while it is being copied.
                counts.allocated += not before
            else:
                counts.reused += 1
                self.reused_by[self._request] = self.reused_by.get(self._request, 0) + 1
        elif before > 0 == after:
            counts.freed += 1

    def _hashed(self, block: Any, before: Any, after: Any) -> None:
        counts = self._counted.get(id(block))
        if counts is None or self._inside == _MOVE:
            return
        if after is not None:
            counts.cached += 1
        elif self._inside not in _CACHE:
            counts.evicted.append(block.block_id)


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
