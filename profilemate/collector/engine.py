# SPDX-License-Identifier: Apache-2.0
"""Replay one engine's events and write its rows.

Which request a block was handed out for is known only at its step's end, so the events of a
step are looked through for that before they are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from profilemate.collector.blocks import OUTPUT, PROMPT, Eviction, Pool
from profilemate.collector.decode import Event, Shape
from profilemate.collector.lookups import Lookups, OpenRow
from profilemate.collector.requests import (
    Finish,
    Request,
    parse_finish,
    parse_request,
    prefix_ids,
    row,
)
from profilemate.collector.steps import StepRows
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.events import Op

_CONTENT_MASK = (1 << 53) - 1
_ONCE_SHIFT = 32

Owner = tuple[int, int]
"""A request's number and the group; the group is -1 where it is not known."""

NOBODY: Owner = (-1, 0)


class Engine:
    """One engine's state. ``header`` is its journal's; ``origin_ns`` is second 0 of the session."""

    def __init__(
        self, header: dict[str, Any], origin_ns: int, key: bytes, tables: Tables, totals: Totals
    ) -> None:
        self.rank = int(header["rank"])
        self.last_ns = origin_ns
        self.mismatches = 0
        self._origin = origin_ns
        self._key = key
        self._caching = bool(header["caching"])
        self._block_size = int(header["hash_block_size"])
        self._told_by_content = int(header["told_by_content"])
        self.shape = Shape(len(header["pools"]), len(header["groups"]))
        self._pools = [Pool(pool["blocks"], pool["null"]) for pool in header["pools"]]
        self._group_pools = [group["pool"] for group in header["groups"]]
        self._totals = totals
        self._requests: dict[int, Request] = {}
        self._finished: list[tuple[Request, Finish, list[int], list[int], list[int | None]]] = []
        self._lookups = Lookups(self._write_lookup)
        self._steps = StepRows(self.rank, origin_ns, tables.append("scheduler_steps.csv"))
        self._usage = tables.append("kv_cache_usage.csv")
        self._allocations = tables.append("kv_cache_allocations.csv")
        self._evictions = tables.append("kv_cache_evictions.csv")
        self._lookup_rows = tables.append("prefix_cache_lookups.csv")
        self._request_rows = tables.append("requests.jsonl")
        self._last_usage: list[tuple[int, ...] | None] = [None] * len(self._pools)
        self._used_once = 0
        self._episode = 0
        self._step = 0
        self._looking_up: Request | None = None
        self._sources: dict[tuple[int, int], int] = {}
        self._asked: list[Request] = []
        self._looked_up: list[Request] = []
        self._admitted: list[Request] = []
        self._parked: list[tuple[str, list[int]]] = []
        """Whose blocks were parked, and which, in the order in which they will come back."""
        totals.add_pools(pool.total for pool in self._pools)

    def apply(self, events: list[Event]) -> None:
        """Replay one episode: the events of a step, or of what came between two."""
        self._episode += 1
        self._step = self._steps.number + sum(
            1 if event.op == Op.STEP else event.numbers[0]
            for event in events
            if event.op in (Op.STEP, Op.REPEAT)
        )
        self._looking_up = None
        self._sources = {
            (event.pool, event.numbers[1]): event.numbers[0]
            for event in events
            if event.op == Op.MOVE
        }
        for event in events:
            if event.op == Op.REQUEST:
                number, _ = event.numbers
                self._requests[number] = parse_request(number, event.blob, event.time)
        owners = self._owners(events)
        for position, event in enumerate(events):
            if event.time:
                self.last_ns = event.until
            if event.op == Op.ALLOCATE:
                self._allocate(event, owners[position])
            else:
                handler = _HANDLERS.get(event.op)
                if handler is not None:
                    handler(self, event)
        self._write_finished()

    def close(self) -> None:
        """Nothing more comes: write what is still open."""
        self._lookups.close_all(self._requests)
        self._steps.close()

    def _owners(self, events: list[Event]) -> dict[int, list[Owner]]:
        """Bring the block tables up to date, and tell whose the blocks of each ALLOCATE were, by
        the event's position."""
        claims: dict[tuple[int, int], Owner] = {}
        owners: dict[int, list[Owner]] = {}
        shared = _reused(events)
        for event in events:
            if event.op == Op.ASSIGN:
                groups = self.shape.groups
                for at, number in enumerate(event.numbers):
                    tables = self._requests[number].tables
                    for group, ids in enumerate(event.lists[at * groups : (at + 1) * groups]):
                        tables.setdefault(group, []).extend(ids)
            elif event.op in (Op.ADMIT, Op.TABLE):
                self._requests[event.numbers[0]].tables = {
                    group: list(ids) for group, ids in enumerate(event.lists)
                }
        for position in range(len(events) - 1, -1, -1):
            event = events[position]
            if event.op in (Op.ASSIGN, Op.ADMIT, Op.TABLE):
                groups = self.shape.groups
                for at, ids in enumerate(event.lists):
                    number = event.numbers[at // groups if event.op == Op.ASSIGN else 0]
                    group = at % groups
                    owner, pool = (number, group), self._pool_of(group)
                    claims.update(
                        ((pool, block), owner)
                        for block in ids
                        if (number, pool, block) not in shared
                    )
            elif event.op == Op.FREE and event.numbers[0]:
                owner = (event.numbers[0] - 1, -1)
                claims.update(
                    ((event.pool, block), owner) for blocks in event.lists for block in blocks
                )
            elif event.op == Op.ALLOCATE:
                owners[position] = [
                    claims.pop((event.pool, block), NOBODY) for block in event.lists[0]
                ]
        return owners

    def _pool_of(self, group: int) -> int:
        return self._group_pools[group] if group < len(self._group_pools) else 0

    def _cell(self, number: int) -> str:
        request = self._requests.get(number)
        return request.cell if request is not None else ""

    def _allocate(self, event: Event, owners: list[Owner]) -> None:
        asking = self._looking_up
        if asking is not None and owners and owners[0] == NOBODY:
            owners = [(asking.number, 0)] * len(owners)
            self._lookups.allocated(asking)
            asking.admitted = asking.admitted or event.time
        pool = self._pools[event.pool]
        holders = [
            self._holder(event.pool, block, owner)
            for block, owner in zip(event.lists[0], owners, strict=True)
        ]
        evictions = pool.allocate(event.lists[0], holders, event.time)
        cell, group = holders[0] if holders else ("", 0)
        for eviction in evictions:
            self._write_eviction(eviction, "reallocated", cell, event.pool)
        self._totals.allocated += len(holders)
        self._write_move(event, "allocate", len(holders), cell, len(evictions), group)

    def _holder(self, number: int, block: int, owner: Owner) -> tuple[str, int]:
        """Cell of the request that a block was handed out for, and the group."""
        pool, source = self._pools[number], self._sources.get((number, block))
        if owner == NOBODY and source is not None:
            # The cache's own copy of a block that its request goes on writing.
            return pool.owner(source), pool.groups[source]
        return self._cell(owner[0]), max(0, owner[1])

    def _reuse(self, event: Event) -> None:
        cell = self._looking_up.cell if self._looking_up is not None else ""
        pool = self._pools[event.pool]
        count = pool.reuse(event.lists[0], cell, event.time)
        if count:
            real = next(block for block in event.lists[0] if block != pool.null)
            self._write_move(event, "reuse", count, cell, 0, pool.groups[real])

    def _free(self, event: Event) -> None:
        (freer,) = event.numbers
        request = self._requests.get(freer - 1) if freer else None
        last, shared = event.lists
        cell = request.cell if request else self._unpark(last + shared)
        released = self._pools[event.pool].free(last, cell, event.time)
        self._given_up(event, request, last + shared, released)

    def _release(self, event: Event) -> None:
        number, count = event.numbers
        request = self._requests[number]
        blocks = (request.leaving or request.tables.get(0, []))[::-1]
        request.leaving = []
        self.mismatches += len(blocks) != count
        released = self._pools[event.pool].drop(blocks, request.cell, event.time)
        self._given_up(event, request, blocks, released)

    def _given_up(
        self, event: Event, request: Request | None, blocks: list[int], released: list[int]
    ) -> None:
        pool = self._pools[event.pool]
        if request is not None and request.freed_blocks is not None:
            request.freed_blocks += sum(block != pool.null for block in blocks)
        if released:
            self._totals.freed += len(released)
            block = released[0]
            self._write_move(event, "free", len(released), pool.owner(block), 0, pool.groups[block])

    def _cache(self, event: Event) -> None:
        number, first, count = event.numbers
        blocks = self._requests[number].tables[0][first : first + count]
        size = self._block_size
        self._make_reusable(event, number, 0, blocks, (first + 1) * size, size)

    def _cache_list(self, event: Event) -> None:
        number, group, tokens, stride = event.numbers
        self._make_reusable(event, number, group, event.lists[0], tokens, stride)

    def _make_reusable(
        self, event: Event, number: int, group: int, blocks: list[int], tokens: int, stride: int
    ) -> None:
        request = self._requests.get(number)
        prompt = request.prompt_tokens if request is not None else 0
        pool = self._pools[event.pool]
        for block, block_hash in zip(blocks, event.hashes, strict=True):
            origin = PROMPT if tokens <= prompt else OUTPUT
            pool.cache(block, self._content_id(block_hash), origin, group)
            tokens += stride
        self._write_move(event, "cache", len(blocks), self._cell(number), 0, group)

    def _evict(self, event: Event) -> None:
        pool = self._pools[event.pool]
        for block in event.lists[0]:
            if pool.contents[block] is not None:
                self._write_eviction(pool.evict(block, event.time), "explicit", "", event.pool)

    def _reset(self, event: Event) -> None:
        if not event.numbers[0]:
            self._write_move(event, "reset_refused", 0, "", 0, None)
            return
        evictions = self._pools[event.pool].evict_all(event.time)
        for eviction in evictions:
            self._write_eviction(eviction, "reset", "", event.pool)
        self._write_move(event, "reset", len(evictions), "", len(evictions), None)

    def _move(self, event: Event) -> None:
        source, target = event.numbers
        self._pools[event.pool].move(source, target)

    def _lookup(self, event: Event) -> None:
        number, query, hit, skipped = event.numbers
        request = self._requests[number]
        self._looking_up = request
        self._asked.append(request)
        self._lookups.looked_up(request, query, hit, bool(skipped), event.time, self._episode)

    def _preempt(self, event: Event) -> None:
        number, computed = event.numbers
        request = self._requests[number]
        request.preemptions += 1
        request.preempted_tokens = max(request.preempted_tokens, computed)
        request.leaving = request.tables.get(0, [])
        request.tables = {}
        self._steps.preempted += 1
        self._totals.preemptions += 1

    def _finish(self, event: Event) -> None:
        request = self._requests[event.numbers[0]]
        finish = parse_finish(request, event)
        arrived_with, request.prompt_tokens = request.prompt_tokens, finish.prompt_tokens
        self._lookups.ended(request)
        self._steps.finished += 1
        prompt_ids, output_ids = self._hash_ids(request, finish)
        known = prompt_ids[: request.prompt_tokens // self._block_size]
        prefixes = prefix_ids(request, arrived_with, self._told_by_content, known)
        request.freed_blocks = 0
        self._finished.append((request, finish, prompt_ids, output_ids, prefixes))

    def _park(self, event: Event) -> None:
        (number,) = event.numbers
        self._take_away(self._requests.get(number), event.lists[0])

    def _park_all(self, event: Event) -> None:
        request = self._requests[event.numbers[0]]
        self._take_away(request, request.tables.get(0, []))

    def _take_away(self, request: Request | None, blocks: list[int]) -> None:
        if len(self._pools) == 1:
            # Blocks of several pools come back apart, and no longer look like these.
            self._parked.append((request.cell if request else "", sorted(blocks)))
        if request is not None and request.freed_blocks is not None:
            null = self._pools[0].null
            request.freed_blocks += sum(block != null for block in blocks)

    def _unpark(self, blocks: list[int]) -> str:
        """Cell of the request whose blocks these were when they were parked, or empty."""
        wanted = sorted(blocks)
        for at, (cell, parked) in enumerate(self._parked):
            if parked == wanted:
                del self._parked[at]
                return cell
        return ""

    def _admit(self, event: Event) -> None:
        number, computed = event.numbers
        request = self._requests[number]
        self._lookups.admitted(request, computed)
        self._admitted.append(request)

    def _step_ended(self, event: Event) -> None:
        for request in self._admitted:
            if request.admitted is None:
                request.admitted = event.time
        self._admitted.clear()
        self._looked_up, self._asked = self._asked, []
        running, waiting, _, _, _, *free_counts = event.numbers
        self._steps.ended(event)
        self._write_usage(event.until, running, waiting, free_counts)

    def _updated(self, event: Event) -> None:
        running, waiting, *free_counts = event.numbers
        self._write_usage(event.time, running, waiting, free_counts)

    def _repeated(self, event: Event) -> None:
        self._steps.repeated(event)
        self._lookups.repeated(self._looked_up, event.numbers[0], event.time)

    def _first_token(self, event: Event) -> None:
        for number in event.numbers:
            request = self._requests.get(number)
            if request is not None and request.first_token is None:
                request.first_token = event.time

    def _content_id(self, block_hash: int) -> int:
        digest = blake2b(block_hash.to_bytes(8, "little"), digest_size=8, key=self._key)
        return int.from_bytes(digest.digest(), "little") & _CONTENT_MASK

    def _hash_ids(self, request: Request, finish: Finish) -> tuple[list[int], list[int]]:
        """Content ids of the prompt's blocks, the last partial one included, and of the full
        blocks that follow."""
        if not self._caching:
            return [], []
        if finish.hashes:
            ids = [self._content_id(block_hash) for block_hash in finish.hashes]
        else:
            contents = self._pools[0].contents
            ids = []
            for block in request.tables.get(0, ()):
                content = contents[block]
                if content is None:
                    break
                ids.append(content)
        full = request.prompt_tokens // self._block_size
        prompt_ids = ids[:full]
        while len(prompt_ids) * self._block_size < request.prompt_tokens:
            self._used_once += 1
            prompt_ids.append(self.rank << _ONCE_SHIFT | self._used_once)
        # The last token's own KV is never there, and what was not computed is nowhere.
        tokens = min(finish.computed_tokens, request.prompt_tokens + finish.output_tokens - 1)
        return prompt_ids, ids[full : max(full, tokens // self._block_size)]

    def _write_finished(self) -> None:
        for request, finish, prompt_ids, output_ids, prefixes in self._finished:
            if not request.freed_blocks:
                request.freed_blocks = request.num_blocks
            self._request_rows(
                row(
                    request,
                    finish,
                    self.rank,
                    self._origin,
                    self._block_size,
                    prompt_ids,
                    output_ids,
                    prefixes,
                )
            )
            self._totals.requests += 1
            del self._requests[request.number]
        self._finished.clear()

    def _write_usage(self, time: int, running: int, waiting: int, free_counts: list[int]) -> None:
        for number, (pool, free) in enumerate(zip(self._pools, free_counts, strict=True)):
            held = pool.num_held
            self.mismatches += free != pool.total - held
            state = (held, pool.num_cached, running, waiting)
            if state == self._last_usage[number]:
                continue
            self._last_usage[number] = state
            usage = 100 * (1 - free / pool.total) if pool.total else 0.0
            self._totals.held(self.rank, number, held)
            self._usage(
                f"{self._seconds(time)},{usage:.2f},{held},{pool.total},{pool.num_cached},"
                f"{pool.num_free},{running},{waiting},{self.rank},{number}"
            )

    def _write_move(
        self, event: Event, name: str, count: int, cell: str, evicted: int, group: int | None
    ) -> None:
        self._allocations(
            f"{self._seconds(event.time)},{name},{count},{cell},{evicted},{self._step},"
            f"{self.rank},{event.pool},{'' if group is None else group}"
        )

    def _write_eviction(self, eviction: Eviction, reason: str, cell: str, pool: int) -> None:
        evictable = "" if eviction.evictable is None else f"{eviction.evictable / 1e9:.6f}"
        self._totals.evicted(eviction.lifetime, eviction.idle)
        self._evictions(
            f"{self._seconds(eviction.time)},{eviction.lifetime / 1e9:.6f},"
            f"{eviction.idle / 1e9:.6f},{evictable},{eviction.block},{eviction.reuse_count},"
            f"{reason},{eviction.content},{eviction.copies_left},{eviction.origin},"
            f"{eviction.owner},{cell},{self.rank},{pool},{eviction.group}"
        )

    def _write_lookup(
        self, request: Request, lookup: OpenRow, external: int, admitted: int
    ) -> None:
        self._lookup_rows(
            f"{self._seconds(lookup.began)},{request.cell},{lookup.query_tokens},"
            f"{lookup.hit_tokens},{external},{lookup.kind},{admitted},{lookup.lookups},{self.rank}"
        )

    def _seconds(self, time: int) -> str:
        return f"{(time - self._origin) / 1e9:.6f}"


def _reused(events: list[Event]) -> set[tuple[int, int, int]]:
    """Request, pool and block of what was taken up again: it is in that request's table, but
    the one that it was handed out for, maybe in this very step, is another."""
    reused: set[tuple[int, int, int]] = set()
    number = -1
    for event in events:
        if event.op == Op.LOOKUP:
            number = event.numbers[0]
        elif event.op == Op.REUSE:
            reused.update((number, event.pool, block) for block in event.lists[0])
    return reused


_HANDLERS: dict[int, Callable[[Engine, Event], None]] = {
    Op.REUSE: Engine._reuse,
    Op.FREE: Engine._free,
    Op.RELEASE: Engine._release,
    Op.CACHE: Engine._cache,
    Op.CACHE_LIST: Engine._cache_list,
    Op.EVICT: Engine._evict,
    Op.RESET: Engine._reset,
    Op.MOVE: Engine._move,
    Op.LOOKUP: Engine._lookup,
    Op.PREEMPT: Engine._preempt,
    Op.FINISH: Engine._finish,
    Op.PARK: Engine._park,
    Op.PARK_ALL: Engine._park_all,
    Op.ADMIT: Engine._admit,
    Op.STEP: Engine._step_ended,
    Op.UPDATE: Engine._updated,
    Op.REPEAT: Engine._repeated,
    Op.FIRST_TOKEN: Engine._first_token,
}
"""What arrives and who got what has been read before these are called."""
