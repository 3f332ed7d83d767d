# SPDX-License-Identifier: Apache-2.0
"""A second opinion: what happened inside vLLM's pools, counted there.

The counters sit in the classes of vLLM, below whatever is put on their objects, and share no
code with what they check. Where vLLM keeps the truth in a structure of its own (the free queue,
a block's hash, the map of cached blocks), it is read there and not rebuilt.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

FIRST, RETRY, RESUMED, SKIPPED = "first", "retry", "resumed", "skipped"


@dataclass(frozen=True)
class Move:
    """One call that moved blocks. ``requests`` are those it may be put down to: more than one
    where vLLM itself no longer knows, none where it is no request's doing."""

    time: int
    event: str
    blocks: int
    requests: frozenset[str]
    evicted: int
    step: int
    pool: int
    group: int | None


@dataclass(frozen=True)
class Eviction:
    """One block that lost its content. Times in nanoseconds; ``content`` is vLLM's hash."""

    time: int
    lifetime: int
    idle: int
    evictable: int | None
    block: int
    reuse_count: int
    reason: str
    content: bytes
    copies_left: int
    origin: str
    owners: frozenset[str]
    evicting: str
    pool: int
    group: int


@dataclass(frozen=True)
class State:
    """A pool and its scheduler at one moment.

    ``cached`` and ``free`` are None where the pool was not walked through; ``running`` and
    ``waiting`` are None between two half steps, where requests come and go unnoticed.
    """

    time: int
    pool: int
    held: int
    cached: int | None
    free: int | None
    running: int | None
    waiting: int | None


@dataclass
class Lookup:
    """One prefix-cache lookup."""

    time: int
    request: str
    step: int
    query: int
    hit: int
    kind: str
    admitted: bool = False


@dataclass(frozen=True)
class Step:
    """One ``schedule()``. ``preempted`` and ``finished`` count since the last one's end."""

    time: int
    running: int
    waiting: int
    scheduled: int
    prefill: int
    requests: int
    preempted: int
    finished: int


@dataclass
class Life:
    """What became of one request. Times in nanoseconds."""

    request_id: str
    arrived: int
    prompt: list[int]
    admitted: int | None = None
    first_token: int | None = None
    hit: int = 0
    known_tokens: int = 0
    """Tokens there were when it was last admitted: computing those is prefill."""
    preemptions: int = 0
    wasted: int = 0
    """Computed tokens that preemptions threw away."""
    finished: int | None = None
    reason: str = ""
    output: int = 0
    computed: int = 0
    computed_before: int = 0
    """The most tokens it had computed when it was preempted, which threw them away."""
    blocks: int = 0
    hashes: list[bytes] = field(default_factory=list)


@dataclass
class _Block:
    """What the oracle remembers of a block between calls."""

    allocated: int = 0
    accessed: int = 0
    freed: int = 0
    reuses: int = 0
    origin: str = ""
    group: int | None = None
    last: frozenset[str] = frozenset()
    sharers: set[str] = field(default_factory=set)
    """All that took it up since it was allocated."""


class Oracle:
    """Counts what happens to every scheduler that is made inside ``watching()``.

    ``walk_every`` says how often a pool is walked through to count its cached and free blocks:
    at the end of every so many half steps.
    """

    def __init__(self, walk_every: int = 1) -> None:
        self.moves: list[Move] = []
        self.evictions: list[Eviction] = []
        self.reuse_gaps: list[int] = []
        """Of each block that a request found which was never preempted: nanoseconds since the
        block's last allocation or reuse."""
        self.cached: list[tuple[int, int, bytes]] = []
        """Each content that got into a block: how many evictions came before, the pool, and vLLM's
        hash."""
        self.states: list[State] = []
        self.lookups: list[Lookup] = []
        self.steps: list[Step] = []
        self.lives: dict[str, Life] = {}
        self.pools: list[Any] = []
        self._walk_every = walk_every
        self._half_steps = 0
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._parked: dict[tuple[int, int], list[str]] = {}
        self._request = ""
        self._freeing = False
        self._allocating: list[tuple[int, bytes, int]] | None = None
        """Block, content and copies left of what ``get_new_blocks`` evicted so far."""
        self._later: list[Callable[[], None]] = []
        self._preempted = 0
        self._finished = 0
        self._scheduling = 0
        """1 while ``schedule()`` runs: the step that it makes is not in ``steps`` yet."""
        self._new: list[tuple[int, list[int], int]] = []
        """Pool, block ids and position in ``moves`` of what ``allocate_slots`` got so far."""
        self._last_lookups: dict[str, Lookup] = {}

    @contextmanager
    def watching(self) -> Iterator[Oracle]:
        """Count in the schedulers that are made from now on, until the block ends."""
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        with ExitStack() as stack:
            for owner, methods in (
                (BlockPool, _POOL_METHODS),
                (KVCacheManager, _MANAGER_METHODS),
                (Scheduler, _SCHEDULER_METHODS),
            ):
                for name, around in methods.items():
                    stack.enter_context(self._around(owner, name, around))
            yield self
        self._catch_up()

    @contextmanager
    def _around(self, owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
        original = vars(owner)[name]

        @functools.wraps(original)
        def counted(instance: Any, *args: Any, **kwargs: Any) -> Any:
            self._catch_up()
            return around(self, original, instance, *args, **kwargs)

        setattr(owner, name, counted)
        try:
            yield
        finally:
            setattr(owner, name, original)

    def _catch_up(self) -> None:
        """Write down what was only noted, so as not to come between a call and its hook."""
        later, self._later = self._later, []
        for write in later:
            write()

    def total(self, event: str, pool: int = 0) -> int:
        """Blocks that this event moved in all."""
        return sum(m.blocks for m in self.moves if m.event == event and m.pool == pool)

    def look(self, scheduler: Any = None, *, walk: bool = True) -> None:
        """Note the state of the pools as it is now, and of the scheduler."""
        self._catch_up()
        running, waiting = scheduler.get_request_counts() if scheduler else (None, None)
        for number, pool in enumerate(self.pools):
            total = pool.num_gpu_blocks - 1
            held = total - pool.free_block_queue.num_free_blocks
            cached = free = None
            if walk:
                queue = pool.free_block_queue.get_all_free_blocks()
                assert len(queue) == total - held
                cached = sum(block.block_hash is not None for block in queue)
                free = len(queue) - cached
            now = time.monotonic_ns()
            self.states.append(State(now, number, held, cached, free, running, waiting))

    def contents(self, pool: int = 0) -> dict[int, bytes]:
        """Block id to hash of every block that has a content now."""
        blocks = self.pools[pool].blocks
        return {b.block_id: b.block_hash for b in blocks if b.block_hash is not None}

    def _number(self, pool: Any) -> int:
        for number, known in enumerate(self.pools):
            if known is pool:
                return number
        self.pools.append(pool)
        return len(self.pools) - 1

    def _block(self, pool: int, block_id: int) -> _Block:
        return self._blocks.setdefault((pool, block_id), _Block())

    def _move(
        self,
        event: str,
        blocks: int,
        pool: int,
        group: int | None,
        requests: Iterable[str] | None = None,
        *,
        evicted: int = 0,
        now: int | None = None,
    ) -> None:
        if requests is None:
            requests = [self._request] if self._request else []
        self.moves.append(
            Move(
                time.monotonic_ns() if now is None else now,
                event,
                blocks,
                frozenset(requests),
                evicted,
                len(self.steps) + self._scheduling,
                pool,
                group,
            )
        )

    # The pool's methods.

    def _get_new_blocks(self, original: Any, pool: Any, num_blocks: int) -> Any:
        number, self._allocating = self._number(pool), []
        blocks = original(pool, num_blocks)
        gone, self._allocating = self._allocating, None
        ids = [block.block_id for block in blocks]
        now = time.monotonic_ns()
        self._later.append(lambda: self._allocated(number, ids, gone, now))
        return blocks

    def _allocated(
        self, pool: int, ids: list[int], gone: list[tuple[int, bytes, int]], now: int
    ) -> None:
        for block_id, content, copies in gone:
            self._evicted(
                pool, block_id, content, copies, now, reason="reallocated", by=self._request
            )
        for block_id in ids:
            self._blocks[pool, block_id] = known = _Block(now, now)
            self._hold(known)
        if ids:
            self._move("allocate", len(ids), pool, None, evicted=len(gone), now=now)
            self._new.append((pool, ids, len(self.moves) - 1))

    def _touch(self, original: Any, pool: Any, blocks: Any) -> Any:
        result = original(pool, blocks)
        now, number = time.monotonic_ns(), self._number(pool)
        real = [block for block in blocks if not block.is_null]
        if real:
            ids, group = [block.block_id for block in real], _group_of(real[0].block_hash)
            self._later.append(lambda: self._touched(number, ids, group, now))
        return result

    def _touched(self, pool: int, ids: list[int], group: int, now: int) -> None:
        by = self.lives.get(self._request)
        for block_id in ids:
            known = self._block(pool, block_id)
            if by is None or not by.preemptions:
                self.reuse_gaps.append(now - known.accessed)
            known.accessed = now
            known.reuses += 1
            self._hold(known)
        self._move("reuse", len(ids), pool, group, now=now)

    def _hold(self, known: _Block) -> None:
        if self._request:
            known.sharers.add(self._request)
            known.last = frozenset([self._request])

    def _free_blocks(self, original: Any, pool: Any, ordered_blocks: Any) -> Any:
        blocks = list(ordered_blocks)
        return self._let_go(pool, blocks, lambda: original(pool, iter(blocks)))

    def _unpin_blocks(self, original: Any, pool: Any, blocks: Any, on_reuse: Any) -> Any:
        blocks = list(blocks)
        return self._let_go(pool, blocks, lambda: original(pool, iter(blocks), on_reuse))

    def _let_go(self, pool: Any, blocks: list[Any], call: Callable[[], Any]) -> Any:
        number, now = self._number(pool), time.monotonic_ns()
        queue, before = pool.free_block_queue, pool.free_block_queue.num_free_blocks
        mine = [b for b in blocks if b.pool in (None, pool) and not b.is_null]
        held = {b.block_id for b in mine if b.ref_cnt > 0}
        names = {b.block_id: self._who_lets_go(number, b.block_id) for b in mine}
        result = call()
        released = [b for b in mine if b.block_id in held and b.ref_cnt == 0]
        released = list({b.block_id: b for b in released}.values())
        assert queue.num_free_blocks - before == len(released)
        for block in released:
            known = self._block(number, block.block_id)
            known.freed = now
            known.last = names[block.block_id] or known.last
        if released:
            first = released[0]
            group = self._block(number, first.block_id).group
            self._move("free", len(released), number, group, names[first.block_id])
        return result

    def _who_lets_go(self, pool: int, block_id: int) -> frozenset[str]:
        known = self._block(pool, block_id)
        parked = self._parked.get((pool, block_id))
        if self._freeing:
            return frozenset([self._request])
        if self._request:
            # A window slid on: the pool does not know whose reference this was.
            return frozenset(known.sharers | {self._request})
        if parked:
            return frozenset([parked.pop(0)])
        return known.last

    def _cache_full_blocks(self, original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        return self._cache(original, pool, args, kwargs, _full_blocks)

    def _cache_partial_block(self, original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        return self._cache(original, pool, args, kwargs, _partial_block)

    def _cache(self, original: Any, pool: Any, args: Any, kwargs: Any, blocks_of: Any) -> Any:
        given = dict(zip(_parameters(original), args, strict=False)) | kwargs
        request, group = given["request"], given["kv_cache_group_id"]
        blocks = [(block, tokens) for block, tokens in blocks_of(given) if not block.is_null]
        before = {block.block_id: block.block_hash for block, _ in blocks}
        result = original(pool, *args, **kwargs)
        number = self._number(pool)
        changed = [
            (block, tokens)
            for block, tokens in blocks
            if block.block_hash is not None and block.block_hash != before[block.block_id]
        ]
        for block, tokens in changed:
            known = self._block(number, block.block_id)
            known.origin = "prompt" if tokens <= request.num_prompt_tokens else "output"
            known.group = group
            self.cached.append((len(self.evictions), number, block.block_hash))
        if changed:
            self._move("cache", len(changed), number, group, [request.request_id])
        return result

    def _evict_cached(self, original: Any, pool: Any, block: Any) -> Any:
        content = block.block_hash
        held = block.ref_cnt > 0
        result = original(pool, block)
        if content is not None:
            gone = (block.block_id, content, _copies(pool, content))
            if self._allocating is not None:
                self._allocating.append(gone)
            else:
                now = time.monotonic_ns()
                self._evicted(self._number(pool), *gone, now, reason="explicit", held=held)
        return result

    def _reset(self, original: Any, pool: Any) -> Any:
        number = self._number(pool)
        contents = self.contents(number)
        done = original(pool)
        if done:
            assert not self.contents(number)
            now = time.monotonic_ns()
            for block_id, content in contents.items():
                self._evicted(number, block_id, content, 0, now, reason="reset")
            self._move("reset", len(contents), number, None, [], evicted=len(contents))
        else:
            self._move("reset_refused", 0, number, None, [])
        return done

    def _evicted(
        self,
        pool: int,
        block_id: int,
        content: bytes,
        copies_left: int,
        now: int,
        *,
        reason: str,
        by: str = "",
        held: bool = False,
    ) -> None:
        known = self._block(pool, block_id)
        owners = frozenset(known.sharers) if held else known.last
        self.evictions.append(
            Eviction(
                now,
                now - known.allocated,
                now - known.accessed,
                None if held else now - known.freed,
                block_id,
                known.reuses,
                reason,
                content,
                copies_left,
                known.origin,
                owners,
                by,
                pool,
                _group_of(content),
            )
        )

    def _move_hashes(self, original: Any, pool: Any, src_block: Any, dst_block: Any) -> Any:
        number = self._number(pool)
        source = self._block(number, src_block.block_id)
        target = self._block(number, dst_block.block_id)
        target.origin, target.group = source.origin, source.group
        return original(pool, src_block, dst_block)

    # The manager's methods.

    def _allocate_slots(
        self, original: Any, manager: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._request = request.request_id
        self._new = []
        try:
            return original(manager, request, *args, **kwargs)
        finally:
            self._catch_up()
            if self._new:
                self._place_new_blocks(manager, request.request_id)
            self._request = ""

    def _place_new_blocks(self, manager: Any, request_id: str) -> None:
        """Which group of the request's the new blocks went to: its block tables say.

        A block in none of them is a copy that the cache keeps for itself.
        """
        for of, tables in enumerate(manager.coordinator.single_type_managers):
            pool = self._number(tables.block_pool)
            ids = {b.block_id for b in tables.req_to_blocks.get(request_id, ()) if not b.is_null}
            for number, new, _ in self._new:
                if number == pool and ids.intersection(new):
                    for block_id in new:
                        self._block(pool, block_id).group = of
        for number, new, at in self._new:
            group = self._block(number, new[0]).group
            self.moves[at] = replace(self.moves[at], group=group)
        self._new = []

    def _free(self, original: Any, manager: Any, request: Any) -> Any:
        self._request, self._freeing = request.request_id, True
        try:
            return original(manager, request)
        finally:
            self._request, self._freeing = "", False

    def _park(self, original: Any, manager: Any, request: Any) -> Any:
        blocks = original(manager, request)
        for block in blocks:
            if not block.is_null:
                pool = self._number(block.pool or manager.block_pool)
                self._parked.setdefault((pool, block.block_id), []).append(request.request_id)
        return blocks

    def _get_computed_blocks(self, original: Any, manager: Any, request: Any) -> Any:
        found = original(manager, request)
        name = request.request_id
        if request.skip_reading_prefix_cache:
            kind = SKIPPED
        elif request.num_preemptions:
            kind = RESUMED
        else:
            kind = RETRY if name in self._last_lookups else FIRST
        if manager.enable_caching:
            step = len(self.steps) + self._scheduling
            now = time.monotonic_ns()
            lookup = Lookup(now, name, step, request.num_tokens, found[1], kind)
            self.lookups.append(lookup)
            self._last_lookups[name] = lookup
        return found

    # The scheduler's methods.

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        before = {name: r.num_computed_tokens for name, r in scheduler.requests.items()}
        self._scheduling = 1
        output = original(scheduler, *args, **kwargs)
        self._scheduling = 0
        now = time.monotonic_ns()
        cached = output.scheduled_cached_reqs
        starts = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        resumed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update({name: resumed[name] for name in cached.resumed_req_ids})
        for name, hit in starts.items():
            life, before[name] = self.lives[name], hit
            life.known_tokens = scheduler.requests[name].num_tokens
            if name in self._last_lookups:
                self._last_lookups[name].admitted = True
            if life.admitted is None:
                life.admitted = now
                life.hit = hit
        prefill = sum(
            min(count, max(0, self.lives[name].known_tokens - before[name]))
            for name, count in output.num_scheduled_tokens.items()
        )
        running, waiting = scheduler.get_request_counts()
        self.steps.append(
            Step(
                now,
                running,
                waiting,
                output.total_num_scheduled_tokens,
                prefill,
                len(output.num_scheduled_tokens),
                self._preempted,
                self._finished,
            )
        )
        self._preempted = self._finished = 0
        self._end_half_step(scheduler)
        return output

    def _update_from_output(
        self, original: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        results = original(scheduler, scheduler_output, *args, **kwargs)
        for outputs in results.values():
            for result in outputs.outputs:
                life = self.lives[result.request_id]
                if result.new_token_ids and life.first_token is None:
                    life.first_token = time.monotonic_ns()
        self._end_half_step(scheduler)
        return results

    def _end_half_step(self, scheduler: Any) -> None:
        self._half_steps += 1
        self.look(scheduler, walk=self._half_steps % self._walk_every == 0)

    def _add_request(self, original: Any, scheduler: Any, request: Any) -> Any:
        name = request.request_id
        if not self.pools:
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
                self._number(manager.block_pool)
        self.lives[name] = Life(name, time.monotonic_ns(), list(request.prompt_token_ids))
        return original(scheduler, request)

    def _preempt_request(
        self, original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._preempted += 1
        life = self.lives[request.request_id]
        life.preemptions += 1
        life.wasted += request.num_computed_tokens
        life.computed_before = max(life.computed_before, request.num_computed_tokens)
        return original(scheduler, request, *args, **kwargs)

    def _free_request(
        self, original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._finished += 1
        life = self.lives[request.request_id]
        life.finished = time.monotonic_ns()
        life.reason = str(request.get_finished_reason())
        life.output = request.num_output_tokens
        life.computed = request.num_computed_tokens
        life.hashes = list(request.block_hashes)
        life.blocks = sum(
            not block.is_null
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
            for block in manager.req_to_blocks.get(request.request_id, ())
        )
        return original(scheduler, request, *args, **kwargs)


_POOL_METHODS: dict[str, Callable[..., Any]] = {
    "get_new_blocks": Oracle._get_new_blocks,
    "touch": Oracle._touch,
    "free_blocks": Oracle._free_blocks,
    "unpin_blocks": Oracle._unpin_blocks,
    "cache_full_blocks": Oracle._cache_full_blocks,
    "cache_partial_block": Oracle._cache_partial_block,
    "_maybe_evict_cached_block": Oracle._evict_cached,
    "reset_prefix_cache": Oracle._reset,
    "move_block_hashes": Oracle._move_hashes,
}
_MANAGER_METHODS: dict[str, Callable[..., Any]] = {
    "allocate_slots": Oracle._allocate_slots,
    "free": Oracle._free,
    "pop_blocks_for_free": Oracle._park,
    "get_computed_blocks": Oracle._get_computed_blocks,
}
_SCHEDULER_METHODS: dict[str, Callable[..., Any]] = {
    "schedule": Oracle._schedule,
    "update_from_output": Oracle._update_from_output,
    "_free_request": Oracle._free_request,
    "_preempt_request": Oracle._preempt_request,
    "add_request": Oracle._add_request,
}


@functools.cache
def _parameters(method: Callable[..., Any]) -> list[str]:
    code = method.__code__
    return list(code.co_varnames[1 : code.co_argcount])


def _full_blocks(given: dict[str, Any]) -> list[tuple[Any, int]]:
    """The blocks that a call of cache_full_blocks is about, and the tokens up to their ends."""
    first, end, size = (given[n] for n in ("num_cached_blocks", "num_full_blocks", "block_size"))
    return [(given["blocks"][at], (at + 1) * size) for at in range(first, end)]


def _partial_block(given: dict[str, Any]) -> list[tuple[Any, int]]:
    return [(given["block"], given["num_tokens"])]


def _group_of(content: bytes) -> int:
    from vllm.v1.core.kv_cache_utils import get_group_id

    return int(get_group_id(content))


def _copies(pool: Any, content: bytes) -> int:
    """Blocks that the pool's own map still finds for this content."""
    found = pool.cached_block_hash_to_block._cache.get(content)
    if found is None:
        return 0
    return len(found) if isinstance(found, dict) else 1
