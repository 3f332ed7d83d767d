# SPDX-License-Identifier: Apache-2.0
"""The figures of one engine's whole run, for ``totals.json``."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from profilemate.collector.blocks import Loss
from profilemate.collector.histogram import Histogram
from profilemate.collector.prefix_totals import PrefixTotals
from profilemate.collector.requests import Finish, Request
from profilemate.format import totals
from profilemate.format.totals import BANDS, REUSES, SCHEDULE_NS, TIMES_NS

_MOVED = ("allocate", "reuse", "cache", "free")
_OVER, _FLOORS = 90, (40, 60, 80)


class PoolTotals:
    """One pool: its state after its last change, and how long it was how full."""

    __slots__ = ("band", "band_ns", "cached", "held", "peak_held", "since", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.cached = 0
        self.peak_held = 0
        self.band_ns = [0] * len(BANDS)
        self.band = 0
        self.since: int | None = None
        """When the last change was; None before the first."""

    def bands_until(self, time: int) -> list[int]:
        """How long the pool was in each band, up to this time."""
        band_ns = list(self.band_ns)
        if self.since is not None:
            band_ns[self.band] += max(0, time - self.since)
        return band_ns

    def state(self) -> Any:
        return [self.held, self.cached, self.peak_held, self.band_ns, self.band, self.since]

    def restore(self, state: Any) -> None:
        self.held, self.cached, self.peak_held, band_ns, self.band, self.since = state
        self.band_ns = list(band_ns)


class EngineTotals:
    """One engine. ``held_changed`` is told by how many blocks a pool's held ones changed.

    ``moved`` counts blocks by pool, event and group; whoever writes the rows adds to it.
    """

    def __init__(self, pools: Sequence[int], held_changed: Callable[[int], None]) -> None:
        self.pools = [PoolTotals(total) for total in pools]
        self.moved: defaultdict[tuple[int, str, int | str], int] = defaultdict(int)
        self.resets: defaultdict[tuple[int, bool], int] = defaultdict(int)
        """How often each pool's prefix cache was dropped (True), or that was refused."""
        self.prefix = PrefixTotals()
        self.arrived = 0
        self.preemptions = 0
        self.running = 0
        self.waiting = 0
        self.lifetime = Histogram(TIMES_NS)
        self.idle = Histogram(TIMES_NS)
        self._held_changed = held_changed
        self._evictions: dict[tuple[int, int, str, str], list[int]] = {}
        self._evictable = Histogram(TIMES_NS)
        self._reuse_gap = Histogram(TIMES_NS)
        self._reuses = Histogram(REUSES)
        self._finished: defaultdict[str, int] = defaultdict(int)
        self._tokens = [0, 0, 0]
        """Of prompts and answers, and computed ones, of the requests that ended."""
        self._queue = Histogram(TIMES_NS)
        self._first_token = Histogram(TIMES_NS)
        self._duration = Histogram(TIMES_NS)
        self._steps = [0, 0, 0, 0]
        """Those with tokens of prompts alone, of both, of answers alone, and without any."""
        self._scheduled = [0, 0, 0]
        """Tokens of prompts and of answers, and requests."""
        self._schedule = Histogram(SCHEDULE_NS)

    @property
    def total_blocks(self) -> int:
        return sum(pool.total for pool in self.pools)

    @property
    def evicted(self) -> int:
        """Cached blocks that lost their content."""
        return sum(counts[0] for counts in self._evictions.values())

    @property
    def ended(self) -> int:
        """Requests that ended."""
        return sum(self._finished.values())

    def blocks(self, event: str) -> int:
        """So many blocks were moved by this event."""
        return sum(count for (_, of, _), count in self.moved.items() if of == event)

    def used(self, number: int, time: int, usage_pct: float, held: int, cached: int) -> None:
        """A pool changed to this state."""
        pool = self.pools[number]
        if pool.since is not None:
            pool.band_ns[pool.band] += max(0, time - pool.since)
        pool.since, pool.cached = time, cached
        pool.band = len(_FLOORS) + 1 if usage_pct > _OVER else bisect_right(_FLOORS, usage_pct)
        if held != pool.held:
            self._held_changed(held - pool.held)
            pool.held = held
            if held > pool.peak_held:
                pool.peak_held = held

    def evict(self, losses: list[Loss], time: int, reason: str, pool: int) -> None:
        """These contents were lost."""
        bounds, evictions = TIMES_NS, self._evictions
        lifetimes, idles, evictables = self.lifetime, self.idle, self._evictable
        reused = self._reuses
        for life, copies_left, blocks, _ in losses:
            allocated, accessed, freed, reuses, _, group, origin = life
            count = len(blocks)
            lifetime, idle = time - allocated, time - accessed
            place = bisect_right(bounds, lifetime)
            lifetimes.counts[place] += count
            lifetimes.sum += lifetime * count
            if idle != lifetime:
                place = bisect_right(bounds, idle)
            idles.counts[place] += count
            idles.sum += idle * count
            if freed is not None:
                evictables.add(time - freed, count)
            if reuses:
                reused.add(reuses, count)
            else:
                reused.counts[0] += count
            key = (pool, group, reason, origin)
            counts = evictions.get(key)
            if counts is None:
                counts = evictions[key] = [0, 0, 0]
            counts[0] += count
            if not reuses:
                counts[1] += count
            if copies_left:
                counts[2] += count

    def reuse(self, uses: list[tuple[int, int]], time: int) -> None:
        """A request found blocks: when they were last used, and how many were used then."""
        for accessed, count in uses:
            self._reuse_gap.add(time - accessed, count)

    def arrive(self, count: int) -> None:
        """So many requests have arrived by now."""
        self.arrived = count

    def finish(self, request: Request, finish: Finish) -> None:
        """A request ended, and its row is written."""
        self._finished[finish.reason] += 1
        tokens = self._tokens
        tokens[0] += request.prompt_tokens
        tokens[1] += finish.output_tokens
        tokens[2] += finish.computed_tokens
        arrived = request.arrived
        if request.admitted is not None:
            # Where arrivals are not recorded, a request comes when it is looked up, within a step.
            self._queue.add(max(0, request.admitted - arrived))
        if request.first_token is not None:
            self._first_token.add(max(0, request.first_token - arrived))
        self._duration.add(finish.time - arrived)
        self.prefix.forget(request.number)

    def step(self, duration: int, tokens: int, prefill: int, requests: int) -> None:
        """A step ended."""
        if not tokens:
            self._steps[3] += 1
            return
        self._steps[(prefill < tokens) + (not prefill)] += 1
        scheduled = self._scheduled
        scheduled[0] += prefill
        scheduled[1] += tokens - prefill
        scheduled[2] += requests
        self._schedule.add(duration)

    def repeat(self, count: int) -> None:
        """A step that scheduled nothing was repeated."""
        self._steps[3] += count

    def content(self, rank: int, lost: Collection[str], until: int) -> totals.Engine:
        """As in ``totals.json``. ``until``: time of the session's last event."""
        prefill, mixed, decode, idle = self._steps
        return {
            "engine": rank,
            "lost": sorted(lost),
            "pools": [self._pool(number, until) for number in range(len(self.pools))],
            "blocks": {
                "lifetime": self.lifetime.content(),
                "idle": self.idle.content(),
                "evictable": self._evictable.content(),
                "reuse_gap": self._reuse_gap.content(),
                "reuses": self._reuses.content(),
            },
            "prefix_cache": self.prefix.content(),
            "requests": {
                "arrived": self.arrived,
                "running": self.running,
                "waiting": self.waiting,
                "preemptions": self.preemptions,
                "finished": dict(sorted(self._finished.items())),
                "prompt_tokens": self._tokens[0],
                "output_tokens": self._tokens[1],
                "computed_tokens": self._tokens[2],
                "queue": self._queue.content(),
                "first_token": self._first_token.content(),
                "duration": self._duration.content(),
            },
            "steps": {
                "prefill": prefill,
                "mixed": mixed,
                "decode": decode,
                "idle": idle,
                "prefill_tokens": self._scheduled[0],
                "decode_tokens": self._scheduled[1],
                "scheduled_requests": self._scheduled[2],
                "schedule": self._schedule.content(),
            },
        }

    def _pool(self, number: int, until: int) -> totals.Pool:
        pool = self.pools[number]
        return {
            "pool": number,
            "total_blocks": pool.total,
            "held_blocks": pool.held,
            "cached_blocks": pool.cached,
            "free_blocks": pool.total - pool.held - pool.cached,
            "peak_held_blocks": pool.peak_held,
            "band_ns": dict(zip(BANDS, pool.bands_until(until), strict=True)),
            "resets": self.resets[number, True],
            "resets_refused": self.resets[number, False],
            "groups": self._groups(number),
            "evictions": [
                {
                    "group": group,
                    "reason": reason,
                    "origin": origin,
                    "blocks": blocks,
                    "never_reused": never_reused,
                    "copies_left": copies_left,
                }
                for (pool_number, group, reason, origin), counts in sorted(self._evictions.items())
                if pool_number == number
                for blocks, never_reused, copies_left in [counts]
            ],
        }

    def _groups(self, number: int) -> list[totals.Moves]:
        moved = {key: count for key, count in self.moved.items() if key[0] == number}
        groups = sorted({group for _, _, group in moved if isinstance(group, int)})
        return [
            {
                "group": group,
                "allocated_blocks": moved.get((number, "allocate", group), 0),
                "reused_blocks": moved.get((number, "reuse", group), 0),
                "cached_blocks": moved.get((number, "cache", group), 0),
                "freed_blocks": moved.get((number, "free", group), 0),
            }
            for group in groups
        ]

    def state(self) -> Any:
        """What ``restore`` takes; JSON keeps it exactly."""
        return {
            "pools": [pool.state() for pool in self.pools],
            "moved": [[*key, count] for key, count in self.moved.items()],
            "resets": [[*key, count] for key, count in self.resets.items()],
            "evictions": [[*key, counts] for key, counts in self._evictions.items()],
            "prefix": self.prefix.state(),
            "requests": [self.arrived, self.preemptions, self.running, self.waiting],
            "finished": dict(self._finished),
            "tokens": self._tokens,
            "steps": self._steps,
            "scheduled": self._scheduled,
            "histograms": [histogram.state() for histogram in self._histograms()],
        }

    def restore(self, state: Any) -> None:
        """Go on where another one of this engine was."""
        for pool, known in zip(self.pools, state["pools"], strict=True):
            pool.restore(known)
        self.moved.clear()
        self.moved.update({tuple(key): count for *key, count in state["moved"]})
        self.resets.clear()
        self.resets.update({tuple(key): count for *key, count in state["resets"]})
        self._evictions = {tuple(key): list(counts) for *key, counts in state["evictions"]}
        self.prefix.restore(state["prefix"])
        self.arrived, self.preemptions, self.running, self.waiting = state["requests"]
        self._finished = defaultdict(int, state["finished"])
        self._tokens = list(state["tokens"])
        self._steps = list(state["steps"])
        self._scheduled = list(state["scheduled"])
        for histogram, known in zip(self._histograms(), state["histograms"], strict=True):
            histogram.restore(known)

    def _histograms(self) -> tuple[Histogram, ...]:
        return (
            self.lifetime,
            self.idle,
            self._evictable,
            self._reuse_gap,
            self._reuses,
            self._queue,
            self._first_token,
            self._duration,
            self._schedule,
        )
