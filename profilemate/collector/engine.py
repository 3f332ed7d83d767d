# SPDX-License-Identifier: Apache-2.0
"""The state of one engine, rebuilt from its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from profilemate.collector.block_rows import BlockRows
from profilemate.collector.blocks import NEVER, NO_GROUP, Pool
from profilemate.collector.contents import Ids
from profilemate.collector.decode import GAP, Episode, ImpossibleError, events_of
from profilemate.collector.endings import Endings
from profilemate.collector.header import Header
from profilemate.collector.lookups import Lookups, OpenRow
from profilemate.collector.owners import NOBODY, SETTLED, Parts, settle
from profilemate.collector.pauses import Pauses
from profilemate.collector.regrets import Regrets
from profilemate.collector.requests import Finish, Request, count_drafts, note_trace, parse_request
from profilemate.collector.steps import StepRows
from profilemate.collector.tables import Tables
from profilemate.collector.totals import Totals
from profilemate.format.events import PARTS, REASONS, More, Op

_REQUEST, _MOVE = int(Op.REQUEST), int(Op.MOVE)
_STEP, _REPEAT = int(Op.STEP), int(Op.REPEAT)
_LOST = int(Op.LOST)

_LOOKED_AHEAD = SETTLED | {Op.REPEAT, Op.MOVE, Op.REQUEST, Op.LOST}
"""What is looked for in an episode before its events are applied."""


class Engine:
    """One engine's state. ``header`` is its journal's; ``origin_ns`` is second 0 of the session;
    ``ids`` makes its content ids.

    ``lost`` has the parts of the recording that ended early, each with the reason where it is
    known.
    """

    def __init__(
        self, header: Header, origin_ns: int, ids: Ids, tables: Tables, totals: Totals
    ) -> None:
        self.rank = header.rank
        self.last_ns = origin_ns
        self.mismatches = 0
        self.lost: dict[str, str] = {}
        self._origin = origin_ns
        self.content_ids = ids.of_hashes
        self._block_size = header.hash_block_size
        self._max_tokens = header.max_tokens
        self.shape = header.shape
        self._pools = [Pool(pool.blocks, pool.null) for pool in header.pools]
        self._regrets = [Regrets(pool.total) for pool in self._pools]
        usage_blocks = [pool.usage_blocks for pool in header.pools]
        self._group_pools = header.group_pools
        self._session_totals = totals
        self._totals = totals.engine(self.rank, [pool.total for pool in self._pools])
        self._handlers = _HANDLERS
        self._requests: dict[int, Request] = {}
        self._lookups = Lookups(self._write_lookup, self._block_size)
        self._steps = StepRows(self.rank, origin_ns, tables.append("scheduler_steps.csv"))
        self._rows = BlockRows(self.rank, origin_ns, usage_blocks, tables, self._totals)
        self._lookup_rows = tables.append("prefix_cache_lookups.csv")
        self._endings = Endings(
            self.rank,
            origin_ns,
            block_size=self._block_size,
            prefix_unit=header.prefix_unit,
            caching=header.caching,
            once=ids.once,
            append=tables.append("requests.jsonl"),
        )
        self._episode = 0
        self._arrived = 0
        self._looking_up: Request | None = None
        self._sources: dict[tuple[int, int], int] = {}
        self._owners: list[Parts] = []
        """Who got the blocks of each ALLOCATE that this episode has left to apply, the last one
        first."""
        self._asked: list[Request] = []
        self._looked_up: list[Request] = []
        self._admitted: list[Request] = []
        self.pauses = Pauses()
        self._came_before = 0
        self._parked: list[tuple[str, list[int]]] = []
        """Whose blocks were parked, and which, in the order in which they come back."""

    def apply(self, episode: Episode) -> None:
        """Apply the events of one episode."""
        _, ops, events = episode
        self._episode += 1
        self._rows.step = self._steps.number + ops.count(_STEP)
        self._looking_up = None
        self._sources = {}
        if self._handlers is not _WITHOUT_STATE and not _LOOKED_AHEAD.isdisjoint(ops):
            self._look_ahead(episode)
        handlers = self._handlers
        for op, event in zip(ops, events, strict=True):
            handlers[op](self, *event)
        if self._endings:
            for request, finish in self._endings.write(self.lost):
                if request.came_before:
                    self._totals.prefix.forget(request.number)
                else:
                    self._totals.ended.append((request, finish))
                del self._requests[request.number]
        self.last_ns = episode.time or self.last_ns

    def _look_ahead(self, episode: Episode) -> None:
        """Learn what comes after the events that it belongs to, or holds from the start."""
        ops = episode.ops
        if _REPEAT in ops:
            self._rows.step += sum(count for _, count in events_of(episode, _REPEAT))
        if _MOVE in ops:
            self._sources = {
                (pool, target): source for _, pool, source, target in events_of(episode, _MOVE)
            }
        if _REQUEST in ops:
            for time, number, blob in events_of(episode, _REQUEST):
                if number != self._arrived:
                    raise ImpossibleError(f"request {number:,} came after {self._arrived:,} others")
                self._arrived += 1
                request = parse_request(number, blob, time, self._max_tokens, self.content_ids)
                self._requests[number] = request
                self._came_before += request.came_before
            self._totals.arrived = self._arrived - self._came_before
        if _LOST in ops:
            parts = [list(PARTS)[place] for _, place in events_of(episode, _LOST)]
            self._lose(dict.fromkeys(parts, "its journal does not say why"))
        if "blocks" not in self.lost:
            self._owners, mismatches = settle(
                episode, self._requests, self._group_pools, len(self._pools)
            )
            self.mismatches += mismatches

    def close(self) -> None:
        """Nothing more comes: write what is still open."""
        self._lookups.close_all(self._requests)
        self._steps.close()

    def saved(self) -> dict[str, Any]:
        """All of it between two episodes, as JSON."""
        return {
            "last_ns": self.last_ns,
            "mismatches": self.mismatches,
            "lost": self.lost,
            "episode": self._episode,
            "arrived": self._arrived,
            "is_without_state": self._handlers is _WITHOUT_STATE,
            "pools": [pool.saved() for pool in self._pools],
            "regrets": [regrets.saved() for regrets in self._regrets],
            "requests": [request.saved() for request in self._requests.values()],
            "lookups": self._lookups.saved(),
            "steps": self._steps.saved(),
            "rows": self._rows.saved(),
            "used_once": self._endings.used_once,
            "asked": [request.number for request in self._asked],
            "looked_up": [request.number for request in self._looked_up],
            "admitted": [request.number for request in self._admitted],
            "parked": self._parked,
            "pauses": self.pauses.times,
            "came_before": self._came_before,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        for pool, state in zip(self._pools, saved["pools"], strict=True):
            pool.restore(state)
        for regrets, state in zip(self._regrets, saved["regrets"], strict=True):
            regrets.restore(state)
        requests = [Request.restored(state) for state in saved["requests"]]
        self._requests = {request.number: request for request in requests}
        self._lookups.restore(saved["lookups"])
        self._steps.restore(saved["steps"])
        self._rows.restore(saved["rows"])
        self._endings.used_once = saved["used_once"]
        # What a request that has ended asked for no longer counts.
        known = self._requests
        self._asked = [known[number] for number in saved["asked"] if number in known]
        self._looked_up = [known[number] for number in saved["looked_up"] if number in known]
        self._admitted = [known[number] for number in saved["admitted"] if number in known]
        self._parked = [(cell, blocks) for cell, blocks in saved["parked"]]
        self._episode, self._arrived = saved["episode"], saved["arrived"]
        self.pauses.times, self._came_before = saved["pauses"], saved["came_before"]
        if saved["is_without_state"]:
            self._handlers = _WITHOUT_STATE
        self._lose(saved["lost"])
        self.last_ns, self.mismatches = saved["last_ns"], saved["mismatches"]

    def opening(self) -> dict[str, list[str]]:
        """By table, rows that explain what comes now, where earlier rows are gone."""
        requests = self._requests.values()
        moves = [
            f"{self._seconds(since)},{event},{count},{request.cell},0,,{self.rank},0,0"
            for request in requests
            for event, (since, count) in request.got.items()
        ]
        looked_up = [row for each in requests for row in (each.lookup_row, each.refused_row)]
        found = {
            "kv_cache_usage.csv": self._rows.last_rows,
            "kv_cache_allocations.csv": [*moves, *(request.free_row for request in requests)],
            "scheduler_steps.csv": [self._steps.last_row],
            "prefix_cache_lookups.csv": looked_up,
        }
        return {table: [row for row in rows if row] for table, rows in found.items()}

    def miss_events(self, reason: str) -> None:
        """Events that came here are missing. So nothing is known any more of blocks and requests;
        what later steps say of themselves still is."""
        self._handlers = _WITHOUT_STATE
        self._lookups.close_all(self._requests)
        self._endings.forget()
        self._requests.clear()
        self._totals.prefix.forget_all()
        self._admitted.clear()
        self._steps.close()
        self._lose(dict.fromkeys(_OF_STATE, reason))

    def _pause(self, time: int) -> None:
        """Nothing is known of blocks and requests until the recording goes on."""
        self.pauses.begin(time)
        self._lookups.close_all(self._requests)
        self._lookups.forget_all()
        self._requests.clear()
        for waiting in (self._asked, self._looked_up, self._admitted, self._parked):
            waiting.clear()
        for regrets in self._regrets:
            regrets.forget()
        self._steps.close()
        self._steps.begin_anew()
        self._totals.pause(time)

    def _resume(
        self,
        time: int,
        number: int,
        running: int,
        waiting: int,
        held: list[int],
        again: list[int],
        cached: list[tuple[int, list[int], list[str]]],
    ) -> None:
        """The recording goes on, and this is how a pool stands."""
        self.pauses.end(time)
        pool = self._pools[number]
        owned = [
            (request, group, blocks)
            for request in self._requests.values()
            for group, blocks in request.tables.items()
            if self._group_pools[group] == number
        ]
        if "blocks" not in self.lost:
            owners = [(request.cell, group, blocks) for request, group, blocks in owned]
            of_others = 0 if len(self._group_pools) == 1 else NO_GROUP
            pool.begin_again(held, again, cached, owners, of_others)
        for request, group, blocks in owned:
            count = pool.count(blocks)
            request.admitted = time
            if count:
                request.gets("held", count, time)
                self._rows.moved(time, number, "held", count, request.cell, 0, group)
        for request in self._requests.values():
            self._lookups.came_before(request)
        self._rows.forget_usage(number)
        when = self._seconds(time)
        free = pool.total - pool.num_held
        self._totals.running, self._totals.waiting = running, waiting
        if "blocks" not in self.lost:
            self._rows.usage(time, when, number, pool, free, running, waiting)

    def _lose(self, parts: Mapping[str, str]) -> None:
        """These parts of the recording end here, for this reason."""
        self.lost = {**parts, **self.lost}
        if "blocks" in parts and self._handlers is not _WITHOUT_STATE:
            self._handlers = {**_HANDLERS, **dict.fromkeys(_OF_BLOCKS, _ignore)}
        if "blocks" in parts:
            self._session_totals.lose_blocks()
        self._lookups.preemptions_lost = "frees" in self.lost
        self._steps.counts_preempted = "frees" not in self.lost
        self._steps.counts_finished = "requests" not in self.lost

    def _cell(self, number: int) -> str:
        request = self._requests.get(number)
        return request.cell if request is not None else ""

    def _allocate(self, time: int, number: int, blocks: list[int]) -> None:
        parts = self._owners.pop()
        asking = self._looking_up
        if asking is not None and parts and parts[0][0] == NOBODY:
            parts = [((asking.number, 0), blocks)]
            self._lookups.allocated(asking)
            self._first_admitted(asking, time)
        pool = self._pools[number]
        handed_out = list(self._by_owner(number, parts))
        cell, group, _ = handed_out[0] if handed_out else ("", 0, [])
        first = self._requests.get(parts[0][0][0]) if parts else None
        if first is not None:
            first.gets("allocate", len(blocks), time)
        losses = pool.evict(blocks)
        evicted = self._rows.evicted(losses, time, "reallocated", cell, number)
        if evicted:
            self._regrets[number].lose(losses)
        for owner, in_group, part in handed_out:
            pool.allocate(part, owner, in_group, time)
        self._rows.moved(time, number, "allocate", len(blocks), cell, evicted, group)

    def _by_owner(self, number: int, parts: Parts) -> Iterator[tuple[str, int, list[int]]]:
        """The cell of each part's request, the group, and the blocks."""
        for owner, blocks in parts:
            if owner != NOBODY:
                yield self._cell(owner[0]), max(0, owner[1]), blocks
                continue
            for block in blocks:
                source = self._sources.get((number, block))
                if source is None:
                    yield "", 0, [block]
                else:
                    # The cache's own copy of a block that its request goes on writing.
                    yield *self._pools[number].owner(source), [block]

    def _reuse(self, time: int, number: int, blocks: list[int]) -> None:
        cell = self._looking_up.cell if self._looking_up is not None else ""
        pool = self._pools[number]
        uses = pool.reuse(blocks, cell, time)
        if self._looking_up is None or not self._looking_up.preemptions:
            self._totals.reuses += [
                (time - accessed, used) for accessed, used in uses if accessed != NEVER
            ]
        count = pool.count(blocks)
        if count:
            if self._looking_up is not None:
                self._looking_up.gets("reuse", count, time)
            real = next(block for block in blocks if block != pool.null)
            self._rows.moved(time, number, "reuse", count, cell, 0, pool.owner(real)[1])

    def _free(self, time: int, pool: int, freer: int, last: list[int], held: list[int]) -> None:
        request = self._requests.get(freer - 1) if freer else None
        cell = request.cell if request else self._unpark(last + held)
        self._pools[pool].drop_one_holder(held)
        released = self._pools[pool].free(last, cell, time)
        self._given_up(time, pool, request, last + held, released)

    def _release(self, time: int, pool: int, number: int, count: int) -> None:
        request = self._requests[number]
        blocks = (request.leaving or request.tables.get(0, []))[::-1]
        request.leaving = []
        self.mismatches += len(blocks) != count
        released = self._pools[pool].drop(blocks, request.cell, time)
        self._given_up(time, pool, request, blocks, released)

    def _given_up(
        self,
        time: int,
        number: int,
        request: Request | None,
        blocks: list[int],
        released: list[int],
    ) -> None:
        pool = self._pools[number]
        if request is not None and request.freed_blocks is not None:
            request.freed_blocks += pool.count(blocks)
        if released:
            owner, group = pool.owner(released[0])
            row = self._rows.moved(time, number, "free", len(released), owner, 0, group)
            if request is not None:
                request.free_row = row

    def _cache(self, time: int, pool: int, number: int, first: int, contents: list[str]) -> None:
        blocks = self._requests[number].tables[0][first : first + len(contents)]
        size = self._block_size
        self._cache_list(time, pool, number, 0, (first + 1) * size, size, blocks, contents)

    def _cache_list(
        self,
        time: int,
        pool: int,
        number: int,
        group: int,
        tokens: int,
        stride: int,
        blocks: list[int],
        contents: list[str],
    ) -> None:
        request = self._requests.get(number)
        cell, prompt_tokens = (request.cell, request.prompt_tokens) if request else ("", 0)
        self._pools[pool].cache(blocks, contents, group, prompt_tokens, tokens, stride)
        again = self._regrets[pool].cache(group, contents)
        if again:
            self._totals.regretted[pool] += again
        self._rows.moved(time, pool, "cache", len(blocks), cell, 0, group)

    def _evict(self, time: int, pool: int, blocks: list[int]) -> None:
        evictions = self._pools[pool].evict(blocks)
        self._rows.evicted(evictions, time, "explicit", "", pool)

    def _reset(self, time: int, pool: int, done: int) -> None:
        self._totals.resets[pool, bool(done)] += 1
        if not done:
            self._rows.moved(time, pool, "reset_refused", 0, "", 0, "")
            return
        evictions = self._pools[pool].evict_all()
        self._regrets[pool].forget()
        count = self._rows.evicted(evictions, time, "reset", "", pool)
        self._rows.moved(time, pool, "reset", count, "", count, "")

    def _move(self, time: int, pool: int, source: int, target: int) -> None:
        self._pools[pool].move(source, target)

    def _more(self, time: int, kind: int, blob: bytes) -> None:
        if kind == More.DRAFTS:
            count_drafts(self._requests, blob)
        elif kind == More.TRACE:
            note_trace(self._requests, blob)
        else:
            self._more_of_steps(time, kind, blob)

    def _more_of_steps(self, _: int, kind: int, blob: bytes) -> None:
        if kind == More.ENCODER:
            self._steps.encodes(blob)

    def _lookup(self, time: int, number: int, query: int, hit: int, skipped: int) -> None:
        if hit > query:
            raise ImpossibleError(f"a lookup of {query:,} tokens found {hit:,}")
        request = self._requests[number]
        self._looking_up = request
        self._asked.append(request)
        self._lookups.looked_up(request, query, hit, bool(skipped), time, self._episode)

    def _preempt(self, time: int, number: int, computed: int) -> None:
        request = self._requests[number]
        request.preemptions += 1
        request.preempted_tokens = max(request.preempted_tokens, computed)
        request.leaving = request.tables.get(0, [])
        request.tables, request.got = {}, {}
        self._steps.preempted += 1
        self._totals.preemptions += 1

    def _finish(
        self,
        time: int,
        number: int,
        prompt: int,
        output: int,
        computed: int,
        contents: list[str],
        reason: int,
    ) -> None:
        if "requests" in self.lost:
            self._forget(number)
            return
        request = self._requests[number]
        if request.freed_blocks is not None:
            raise ImpossibleError(f"request {number:,} ended twice")
        if time < request.arrived:
            raise ImpossibleError(f"request {number:,} ended before it came")
        if prompt + output > self._max_tokens:
            raise ImpossibleError(f"request {number:,} has {prompt + output:,} tokens")
        # vLLM counts from 0 again after a preemption.
        computed = max(computed, request.preempted_tokens)
        finish = Finish(REASONS[reason], prompt, output, computed, time)
        self._lookups.ended(request)
        self._steps.finished += 1
        if not contents:
            contents = self._pools[0].leading_contents(request.tables.get(0, []))
        self._endings.add(request, finish, contents)

    def _forget(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is not None:
            self._lookups.ended(request)
            self._totals.prefix.forget(number)

    def _park(self, number: int, blocks: list[int]) -> None:
        self._take_away(self._requests.get(number), blocks)

    def _park_all(self, number: int) -> None:
        request = self._requests[number]
        self._take_away(request, request.tables.get(0, []))

    def _take_away(self, request: Request | None, blocks: list[int]) -> None:
        if len(self._pools) == 1:
            # Blocks of several pools come back in several calls, none of which names all of these.
            self._parked.append((request.cell if request else "", sorted(blocks)))
        if request is not None:
            # They come back one by one, even where the request was preempted.
            request.leaving = []
            if request.freed_blocks is not None:
                request.freed_blocks += self._pools[0].count(blocks)

    def _unpark(self, blocks: list[int]) -> str:
        """Cell of the request whose blocks these were when they were parked, or empty."""
        wanted = sorted(blocks)
        for at, (cell, parked) in enumerate(self._parked):
            if parked == wanted:
                del self._parked[at]
                return cell
        return ""

    def _admit(self, number: int, computed: int, _: object) -> None:
        request = self._requests[number]
        self._lookups.admitted(request, computed)
        self._admitted.append(request)

    def _step_ended(self, began: int, ended: int, numbers: list[int]) -> None:
        for request in self._admitted:
            self._first_admitted(request, began)
        self._admitted.clear()
        self._looked_up, self._asked = self._asked, []
        running, waiting, tokens, prefill, scheduled, *free_counts = numbers
        when = self._seconds(ended)
        self._steps.ended(began, ended, when, running, waiting, tokens, prefill, scheduled)
        self._totals.steps.append((ended - began, tokens, prefill, scheduled))
        self._write_usage(ended, when, running, waiting, free_counts)

    def _first_admitted(self, request: Request, time: int) -> None:
        """The request is admitted; only the first time counts."""
        if request.admitted is None:
            request.admitted = time
            if self._totals.waits is not None and not request.came_before:
                self._totals.waits.append(max(0, time - request.arrived))

    def waiting_ns(self, now: int) -> list[int]:
        """How long each request has waited that has never been admitted, in nanoseconds. That is
        not known of one that came before the recording went on."""
        requests = self._requests.values()
        return [
            now - request.arrived
            for request in requests
            if request.admitted is None and not request.came_before
        ]

    def _updated(self, time: int, numbers: list[int]) -> None:
        running, waiting, *free_counts = numbers
        self._write_usage(time, self._seconds(time), running, waiting, free_counts)

    def _repeated(self, time: int, count: int) -> None:
        self._steps.repeated(count, time)
        self._totals.repeat(count)
        self._lookups.repeated(self._looked_up, count, time)

    def _first_token(self, time: int, numbers: list[int]) -> None:
        for number in numbers:
            request = self._requests.get(number)
            if request is not None and request.first_token is None:
                request.first_token = time

    def _write_usage(
        self, time: int, when: str, running: int, waiting: int, free_counts: list[int]
    ) -> None:
        self._totals.running, self._totals.waiting = running, waiting
        if "blocks" in self.lost:
            return
        for number, pool in enumerate(self._pools):
            free = free_counts[number]
            if free > pool.total:
                raise ImpossibleError(f"{free:,} of {pool.total:,} blocks are free")
            if min(pool.num_held, pool.num_cached, pool.num_free) < 0:
                raise ImpossibleError(f"more than {pool.total:,} blocks are held or cached")
            if free != pool.total - pool.num_held:
                self.mismatches += 1
            self._rows.usage(time, when, number, pool, free, running, waiting)

    def _write_lookup(
        self, request: Request, lookup: OpenRow, external: int, admitted: int
    ) -> None:
        self._totals.prefix.rows.append((request.number, lookup, external, admitted))
        row = (
            f"{self._seconds(lookup.began)},{request.cell},{lookup.query_tokens},"
            f"{lookup.hit_tokens},{external},{lookup.kind},{admitted},{lookup.lookups},{self.rank}"
        )
        if admitted:
            request.lookup_row, request.refused_row, request.free_row = row, "", ""
        else:
            request.refused_row = row
        self._lookup_rows(row)

    def _seconds(self, time: int) -> str:
        return f"{(time - self._origin) / 1e9:.6f}"


def _ignore(engine: Engine, *event: Any) -> None:
    """An event that was looked at before, or no longer counts."""


_HANDLERS: dict[int, Callable[..., None]] = {
    Op.MORE: Engine._more,
    Op.ALLOCATE: Engine._allocate,
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
    Op.ADMIT_LOOKED_UP: Engine._admit,
    Op.STEP: Engine._step_ended,
    Op.UPDATE: Engine._updated,
    Op.REPEAT: Engine._repeated,
    Op.FIRST_TOKEN: Engine._first_token,
    Op.REQUEST: _ignore,
    Op.ASSIGN: _ignore,
    Op.TABLE: _ignore,
    Op.LOST: _ignore,
    Op.PAUSE: Engine._pause,
    Op.RESUME: Engine._resume,
    GAP: Engine.miss_events,
}
"""What is called with each event of an episode in turn."""

_WITHOUT_STATE: dict[int, Callable[..., None]] = {
    **dict.fromkeys(_HANDLERS, _ignore),
    Op.STEP: Engine._step_ended,
    Op.REPEAT: Engine._repeated,
    Op.MORE: Engine._more_of_steps,
    Op.PAUSE: lambda engine, time: engine.pauses.begin(time),
    Op.RESUME: lambda engine, time, *_: engine.pauses.end(time),
}
"""The same where events are missing: what can be applied without knowing them."""

_OF_STATE = ("blocks", "frees", "lookups", "requests", "updates")
"""The parts that cannot go on where events are missing."""

_OF_BLOCKS = (
    Op.ALLOCATE,
    Op.REUSE,
    Op.FREE,
    Op.RELEASE,
    Op.CACHE,
    Op.CACHE_LIST,
    Op.EVICT,
    Op.RESET,
    Op.MOVE,
    Op.PARK,
    Op.PARK_ALL,
)
"""What cannot be applied any more once some of it is missing."""
