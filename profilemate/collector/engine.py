# SPDX-License-Identifier: Apache-2.0
"""Replay one engine's events and write its rows.

A frame is one step's worth, or what came between two steps. Which request a block was handed
out for is known only at its end, so a frame is first read backwards for the owners.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from profilemate.collector.blocks import OUTPUT, PROMPT, Eviction, Pool
from profilemate.collector.decode import Event, decode
from profilemate.collector.lookups import Lookups, OpenRow
from profilemate.collector.requests import (
    Finish,
    Request,
    parse_finish,
    parse_request,
    row,
)
from profilemate.collector.steps import StepRows
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.events import STILL_HELD, Op

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
        self._pools = [Pool(pool["blocks"], pool["null"]) for pool in header["pools"]]
        self._group_pools = [group["pool"] for group in header["groups"]]
        self._totals = totals
        self._requests: dict[int, Request] = {}
        self._finished: list[tuple[Request, Finish, list[int], list[int]]] = []
        self._lookups = Lookups(self._write_lookup)
        self._steps = StepRows(self.rank, origin_ns, tables.append("scheduler_steps.csv"))
        self._usage = tables.append("kv_cache_usage.csv")
        self._allocations = tables.append("kv_cache_allocations.csv")
        self._evictions = tables.append("kv_cache_evictions.csv")
        self._lookup_rows = tables.append("prefix_cache_lookups.csv")
        self._request_rows = tables.append("requests.jsonl")
        self._last_usage: list[tuple[int, ...] | None] = [None] * len(self._pools)
        self._used_once = 0
        self._frame = 0
        self._step = 0
        self._looking_up: Request | None = None
        self._sources: dict[tuple[int, int], int] = {}
        self._asked: list[Request] = []
        self._looked_up: list[Request] = []
        self._admitted: list[Request] = []
        self._parked: list[tuple[str, list[int]]] = []
        """Whose blocks were parked, and which, in the order in which they will come back."""
        totals.add_pools(pool.total for pool in self._pools)

    def apply(self, payload: bytes) -> None:
        """Replay one frame.

        Raises:
            DecodeError: the frame cannot be read.

        """
        events = decode(payload)
        owners = self._owners(events)
        self._frame += 1
        self._step = self._steps.number + sum(
            1 if event.op == Op.STEP else event.count
            for event in events
            if event.op in (Op.STEP, Op.REPEAT)
        )
        self._looking_up = None
        self._sources = {
            (event.pool, event.args[1]): event.args[0] for event in events if event.op == Op.MOVE
        }
        for position, event in enumerate(events):
            if event.time:
                self.last_ns = event.until
            if event.op == Op.ALLOCATE:
                self._allocate(event, owners[position])
            else:
                _HANDLERS[event.op](self, event)
        self._write_finished()

    def close(self) -> None:
        """Nothing more comes: write what is still open."""
        self._lookups.close_all(self._requests)
        self._steps.close()

    def _owners(self, events: list[Event]) -> dict[int, list[Owner]]:
        """Whose the blocks of each ALLOCATE were, by the event's position."""
        claims: dict[tuple[int, int], Owner] = {}
        owners: dict[int, list[Owner]] = {}
        shared = _reused(events)
        for position in range(len(events) - 1, -1, -1):
            event = events[position]
            if event.op in (Op.ASSIGN, Op.TABLE):
                request, group = event.args
                owner = (request, group)
                pool = self._pool_of(group)
                claims.update(
                    ((pool, block), owner)
                    for block in event.ids
                    if (request, pool, block) not in shared
                )
            elif event.op == Op.FREE and event.args[0]:
                owner = (event.args[0] - 1, -1)
                claims.update(((event.pool, block & ~STILL_HELD), owner) for block in event.ids)
            elif event.op == Op.ALLOCATE:
                owners[position] = [claims.pop((event.pool, block), NOBODY) for block in event.ids]
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
            for block, owner in zip(event.ids, owners, strict=True)
        ]
        evictions = pool.allocate(event.ids, holders, event.time)
        cell, group = holders[0] if holders else ("", 0)
        for eviction in evictions:
            self._write_eviction(eviction, "reallocated", cell, event.pool)
        self._totals.allocated += event.count
        self._write_move(event, "allocate", event.count, cell, len(evictions), group)

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
        count = pool.reuse(event.ids, cell, event.time)
        if count:
            real = next(block for block in event.ids if block != pool.null)
            self._write_move(event, "reuse", count, cell, 0, pool.groups[real])

    def _free(self, event: Event) -> None:
        freer = event.args[0]
        request = self._requests.get(freer - 1) if freer else None
        pool = self._pools[event.pool]
        if request is not None and request.freed_blocks is not None:
            request.freed_blocks += sum(block & ~STILL_HELD != pool.null for block in event.ids)
        cell = request.cell if request else self._unpark(event)
        released = pool.free(event.ids, cell, event.time)
        if released:
            self._totals.freed += len(released)
            block = released[0]
            self._write_move(event, "free", len(released), pool.owner(block), 0, pool.groups[block])

    def _cache(self, event: Event) -> None:
        number, group, tokens, stride = event.args
        request = self._requests.get(number)
        prompt = request.prompt_tokens if request is not None else 0
        pool = self._pools[event.pool]
        for block, block_hash in zip(event.ids, event.hashes, strict=True):
            origin = PROMPT if tokens <= prompt else OUTPUT
            pool.cache(block, self._content_id(block_hash), origin, group)
            tokens += stride
        self._write_move(event, "cache", event.count, self._cell(number), 0, group)

    def _evict(self, event: Event) -> None:
        pool = self._pools[event.pool]
        for block in event.ids:
            if pool.contents[block] is not None:
                self._write_eviction(pool.evict(block, event.time), "explicit", "", event.pool)

    def _reset(self, event: Event) -> None:
        if not event.count:
            self._write_move(event, "reset_refused", 0, "", 0, None)
            return
        evictions = self._pools[event.pool].evict_all(event.time)
        for eviction in evictions:
            self._write_eviction(eviction, "reset", "", event.pool)
        self._write_move(event, "reset", len(evictions), "", len(evictions), None)

    def _move(self, event: Event) -> None:
        self._pools[event.pool].move(*event.args)

    def _arrive(self, event: Event) -> None:
        number = event.args[0]
        self._requests[number] = parse_request(number, event.blob, event.time)

    def _lookup(self, event: Event) -> None:
        number, query, hit = event.args
        request = self._requests[number]
        self._looking_up = request
        self._asked.append(request)
        self._lookups.looked_up(request, query, hit, bool(event.count), event.time, self._frame)

    def _preempt(self, event: Event) -> None:
        number, computed = event.args
        request = self._requests[number]
        request.preemptions += 1
        request.preempted_tokens = max(request.preempted_tokens, computed)
        request.tables.clear()
        self._steps.preempted += 1
        self._totals.preemptions += 1

    def _finish(self, event: Event) -> None:
        request = self._requests[event.args[0]]
        finish = parse_finish(request, event.blob, event.time)
        request.prompt_tokens = finish.prompt_tokens
        self._lookups.ended(request)
        self._steps.finished += 1
        prompt_ids, output_ids = self._hash_ids(request, finish)
        request.freed_blocks = 0
        self._finished.append((request, finish, prompt_ids, output_ids))

    def _park(self, event: Event) -> None:
        request = self._requests.get(event.args[0])
        if len(self._pools) == 1:
            # Blocks of several pools come back apart, and no longer look like these.
            self._parked.append((self._cell(event.args[0]), event.ids[::-1]))
        if request is not None and request.freed_blocks is not None:
            null = self._pools[0].null
            request.freed_blocks += sum(block != null for block in event.ids)

    def _unpark(self, event: Event) -> str:
        """Cell of the request whose blocks these were when they were parked, or empty."""
        blocks = [block & ~STILL_HELD for block in event.ids]
        for at, (cell, parked) in enumerate(self._parked):
            if parked == blocks:
                del self._parked[at]
                return cell
        return ""

    def _assign(self, event: Event) -> None:
        number, group = event.args
        self._requests[number].tables.setdefault(group, []).extend(event.ids)

    def _table(self, event: Event) -> None:
        number, group = event.args
        self._requests[number].tables[group] = list(event.ids)

    def _admit(self, event: Event) -> None:
        number, computed = event.args
        request = self._requests[number]
        self._lookups.admitted(request, computed)
        self._admitted.append(request)

    def _step_ended(self, event: Event) -> None:
        for request in self._admitted:
            if request.admitted is None:
                request.admitted = event.time
        self._admitted.clear()
        self._looked_up, self._asked = self._asked, []
        running, waiting = event.args[:2]
        self._steps.ended(event)
        self._write_usage(event.until, running, waiting, event.ids)

    def _updated(self, event: Event) -> None:
        running, waiting = event.args
        self._write_usage(event.time, running, waiting, event.ids)

    def _repeated(self, event: Event) -> None:
        self._steps.repeated(event)
        self._lookups.repeated(self._looked_up, event.count, event.time)

    def _first_token(self, event: Event) -> None:
        for number in event.ids:
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
        for request, finish, prompt_ids, output_ids in self._finished:
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
            number = event.args[0]
        elif event.op == Op.REUSE:
            reused.update((number, event.pool, block) for block in event.ids)
    return reused


_HANDLERS: dict[int, Callable[[Engine, Event], None]] = {
    Op.REUSE: Engine._reuse,
    Op.FREE: Engine._free,
    Op.CACHE: Engine._cache,
    Op.EVICT: Engine._evict,
    Op.RESET: Engine._reset,
    Op.MOVE: Engine._move,
    Op.REQUEST: Engine._arrive,
    Op.LOOKUP: Engine._lookup,
    Op.PREEMPT: Engine._preempt,
    Op.FINISH: Engine._finish,
    Op.PARK: Engine._park,
    Op.ASSIGN: Engine._assign,
    Op.TABLE: Engine._table,
    Op.ADMIT: Engine._admit,
    Op.STEP: Engine._step_ended,
    Op.UPDATE: Engine._updated,
    Op.REPEAT: Engine._repeated,
    Op.FIRST_TOKEN: Engine._first_token,
}
