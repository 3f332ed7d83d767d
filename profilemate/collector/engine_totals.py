# SPDX-License-Identifier: Apache-2.0
"""The figures of one engine's whole run, for ``totals.json``."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import compress
from operator import eq, sub
from typing import Any, NamedTuple

from profilemate.collector.histogram import Histogram
from profilemate.collector.prefix_totals import PrefixTotals
from profilemate.collector.requests import Finish, Request
from profilemate.format import totals
from profilemate.format.totals import BANDS, REUSES, SCHEDULE_NS, TIMES_NS

_OVER, _FLOORS = 90, (40, 60, 80)

UNKNOWN = "unknown"
"""The origin of contents that were there when the recording went on after a pause."""


def _of_known(
    times: Sequence[int | None], counts: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """The times that are known, and their counts."""
    pairs = [(time, n) for time, n in zip(times, counts, strict=True) if time is not None]
    return [time for time, _ in pairs], [n for _, n in pairs]


def _three() -> list[int]:
    return [0, 0, 0]


class PoolTotals:
    """One pool: its state after its last change, and how long it was how full."""

    __slots__ = (
        *("band", "band_ns", "cached", "held", "least_held", "most_held", "peak_held", "since"),
        "total",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.least_held = self.most_held = 0
        """Since the last call of ``extremes``."""
        self.cached = 0
        self.peak_held = 0
        self.band_ns = [0] * len(BANDS)
        self.band = 0
        self.since: int | None = None
        """When the last change was; None before the first."""

    def change(self, time: int, usage_pct: float, held: int, cached: int) -> None:
        """It changed to this state."""
        if self.since is not None:
            self.band_ns[self.band] += max(0, time - self.since)
        self.since, self.cached, self.held = time, cached, held
        self.band = _band(usage_pct)
        if held < self.least_held:
            self.least_held = held
        elif held > self.most_held:
            self.most_held = held
            if held > self.peak_held:
                self.peak_held = held

    def change_often(
        self,
        times: Sequence[int],
        usages_pct: Sequence[float],
        helds: Sequence[int],
        cacheds: Sequence[int],
    ) -> None:
        """It changed to each of these states in turn."""
        first, last = times[0], times[-1]
        band = _band(min(usages_pct))
        is_one_band = band == _band(max(usages_pct))
        if is_one_band and min(map(sub, times[1:], times), default=0) >= 0:
            # So for most stretches, and without a look at each state.
            self.change(first, usages_pct[0], min(helds), 0)
            self.change(first, usages_pct[0], max(helds), 0)
            self.band_ns[band] += last - first
            self.since, self.cached, self.held = last, cacheds[-1], helds[-1]
        else:
            for state in zip(times, usages_pct, helds, cacheds, strict=True):
                self.change(*state)

    def extremes(self) -> tuple[int, int]:
        """The least and the most blocks that requests held at once since the last call."""
        found = self.least_held, self.most_held
        self.least_held = self.most_held = self.held
        return found

    def bands_until(self, time: int) -> list[int]:
        """How long the pool was in each band, up to this time."""
        band_ns = list(self.band_ns)
        if self.since is not None:
            band_ns[self.band] += max(0, time - self.since)
        return band_ns

    def saved(self) -> Any:
        return [
            self.held,
            self.cached,
            self.peak_held,
            list(self.band_ns),
            self.band,
            self.since,
        ]

    def restore(self, state: Any) -> None:
        self.held, self.cached, self.peak_held, band_ns, self.band, self.since = state
        self.least_held = self.most_held = self.held
        self.band_ns = list(band_ns)


def _band(usage_pct: float) -> int:
    return len(_FLOORS) + 1 if usage_pct > _OVER else bisect_right(_FLOORS, usage_pct)


class Held:
    """Blocks that requests hold in all pools of the session, now and at the peak.

    Whoever writes a row appends the new state of a pool to ``changes``: the pool, the time, its
    usage in percent as the row has it, and the blocks that are held and cached. There it waits for
    ``fold``. The changes of all pools are in one list, as the peak needs their order.
    """

    __slots__ = ("changes", "held", "peak")

    def __init__(self) -> None:
        self.changes: list[tuple[PoolTotals, int, str, int, int]] = []
        self.held = 0
        self.peak = 0

    def fold(self) -> None:
        """Add up what waits."""
        if not self.changes:
            return
        pools, times, usages, helds, cacheds = zip(*self.changes, strict=True)
        self.changes.clear()
        usages_pct = list(map(float, usages))
        first: PoolTotals = pools[0]
        if pools.count(first) == len(pools):
            elsewhere = self.held - first.held
            first.change_often(times, usages_pct, helds, cacheds)
            self.held = elsewhere + first.held
            self.peak = max(self.peak, elsewhere + max(helds))
            return
        for pool, *state in zip(pools, times, usages_pct, helds, cacheds, strict=True):
            self.held -= pool.held
            pool.change(*state)
            self.held += pool.held
            self.peak = max(self.peak, self.held)


LostBlocks = tuple[int, int, int, int | None, int, int]
"""Blocks that lost their contents together: how many; their lifetime, idle and evictable time; how
often they were reused, and how many other blocks still have each content."""


LossKey = tuple[int, int, str, str]

LostUnknown = tuple[int, int | None, int | None, int]
"""The same of blocks that were there when the recording went on after a pause: how many; their idle
and evictable time, None where that is not known; and how many other blocks have each content."""


class Sums(NamedTuple):
    """Counts of blocks, unless the name says otherwise."""

    total_blocks: int = 0
    allocated: int = 0
    freed: int = 0
    evicted: int = 0
    with_lifetime: int = 0
    """Evicted blocks whose lifetime is known; ``with_idle`` the same."""
    lifetime_ns: int = 0
    with_idle: int = 0
    idle_ns: int = 0
    preemptions: int = 0
    ended: int = 0
    """Requests."""


class EngineTotals:
    """One engine. ``everywhere`` are the held blocks of all pools of the session.

    Whoever writes a row adds to these, which costs much less than to call a method for it:

    Attributes:
        moved: blocks by pool, event and group.
        losses: contents that were lost, by pool, group, reason and origin; in ``unknown_losses``
            those of which not all is known.
        changes: states of the pools of the whole session.
        reuses: nanoseconds since blocks that a request found were used before, and how many.
        steps: how long each step took; its tokens, those of prompts, and its requests.
        ended: requests that ended.

    All but the first wait for ``fold``, which adds them up together.
    """

    def __init__(self, pools: Sequence[int], everywhere: Held) -> None:
        self.pools = [PoolTotals(total) for total in pools]
        self.moved: defaultdict[tuple[int, str, int | str], int] = defaultdict(int)
        self.resets: defaultdict[tuple[int, bool], int] = defaultdict(int)
        """How often each pool's prefix cache was dropped (True), or that was refused."""
        self.regretted = [0] * len(pools)
        """By pool, contents that were computed again after it had lost them."""
        self.prefix = PrefixTotals()
        self.arrived = 0
        self.preemptions = 0
        self.running = 0
        self.waiting = 0
        self.waits: list[int] | None = None
        """How long each request waited that was admitted for the first time, in nanoseconds; None
        where nobody asks for it. Who asks for it takes them out."""
        self.losses: defaultdict[LossKey, list[LostBlocks]] = defaultdict(list)
        self.unknown_losses: defaultdict[LossKey, list[LostUnknown]] = defaultdict(list)
        self.changes = everywhere.changes
        self.reuses: list[tuple[int, int]] = []
        self.steps: list[tuple[int, int, int, int]] = []
        self.ended: list[tuple[Request, Finish]] = []
        self._everywhere = everywhere
        self._evictions: defaultdict[LossKey, list[int]] = defaultdict(_three)
        """Blocks, those never reused, and those with copies, by pool, group, reason, origin."""
        self._lifetime = Histogram(TIMES_NS)
        self._idle = Histogram(TIMES_NS)
        self._evictable = Histogram(TIMES_NS)
        self._reuse_gap = Histogram(TIMES_NS)
        self._reuse_counts = Histogram(REUSES)
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
    def sums(self) -> Sums:
        """What kv_cache_summary.txt adds up over all engines."""
        self.fold()
        return Sums(
            total_blocks=sum(pool.total for pool in self.pools),
            allocated=self._blocks("allocate"),
            freed=self._blocks("free"),
            evicted=sum(counts[0] for counts in self._evictions.values()),
            with_lifetime=self._lifetime.count,
            lifetime_ns=self._lifetime.sum,
            with_idle=self._idle.count,
            idle_ns=self._idle.sum,
            preemptions=self.preemptions,
            ended=sum(self._finished.values()),
        )

    def _blocks(self, event: str) -> int:
        """So many blocks were moved by this event."""
        return sum(count for (_, of, _), count in self.moved.items() if of == event)

    def pause(self, time: int) -> None:
        """Nothing is known of the pools from here on, until one of them changes again."""
        self.fold()
        for pool in self.pools:
            pool.band_ns, pool.since = pool.bands_until(time), None
        self.prefix.forget_all()
        self.running = self.waiting = 0

    def fold(self) -> None:
        """Add up what waits."""
        self.prefix.fold()
        self._everywhere.fold()
        for key, losses in self.losses.items():
            self._add_losses(key, losses)
        self.losses.clear()
        for key, unknown in self.unknown_losses.items():
            self._add_unknown_losses(key, unknown)
        self.unknown_losses.clear()
        if self.reuses:
            gaps, counts = zip(*self.reuses, strict=True)
            self._reuse_gap.add_times(gaps, counts)
            self.reuses.clear()
        if self.steps:
            self._add_steps(self.steps)
            self.steps.clear()
        if self.ended:
            self._add_ended(self.ended)
            self.ended.clear()

    def _add_losses(self, key: LossKey, losses: list[LostBlocks]) -> None:
        counts, lifetimes, idles, evictables, reuses, copies = zip(*losses, strict=True)
        blocks = sum(counts)
        self._lifetime.add_times(lifetimes, counts)
        if any(reuses):
            self._idle.add_times(idles, counts)
            self._reuse_counts.add_times(reuses, counts)
        else:
            # Nobody used them after they were handed out.
            self._idle.add_times(lifetimes, counts)
            self._reuse_counts.add_times([0], [blocks])
        if None in evictables:
            self._evictable.add_times(*_of_known(evictables, counts))
        else:
            self._evictable.add_times(evictables, counts)
        sums = self._evictions[key]
        sums[0] += blocks
        sums[1] += blocks - sum(compress(counts, reuses))
        sums[2] += sum(compress(counts, copies))

    def _add_unknown_losses(self, key: LossKey, losses: list[LostUnknown]) -> None:
        counts, idles, evictables, copies = zip(*losses, strict=True)
        self._idle.add_times(*_of_known(idles, counts))
        self._evictable.add_times(*_of_known(evictables, counts))
        sums = self._evictions[key]
        sums[0] += sum(counts)
        sums[2] += sum(compress(counts, copies))

    def _add_steps(self, steps: list[tuple[int, int, int, int]]) -> None:
        busy = [step for step in steps if step[1]]
        self._steps[3] += len(steps) - len(busy)
        if not busy:
            return
        durations, tokens, prefills, requests = zip(*busy, strict=True)
        prompts, answers = sum(map(eq, tokens, prefills)), prefills.count(0)
        for place, count in enumerate((prompts, len(busy) - prompts - answers, answers)):
            self._steps[place] += count
        self._scheduled[0] += sum(prefills)
        self._scheduled[1] += sum(tokens) - sum(prefills)
        self._scheduled[2] += sum(requests)
        self._schedule.add(durations)

    def _add_ended(self, ended: list[tuple[Request, Finish]]) -> None:
        prompts = outputs = computed = 0
        queues, first_tokens, durations = [], [], []
        for request, (reason, _, output_tokens, computed_tokens, time) in ended:
            self._finished[reason] += 1
            prompts += request.prompt_tokens
            outputs += output_tokens
            computed += computed_tokens
            arrived, admitted, first_token = request.arrived, request.admitted, request.first_token
            # Where arrivals are not recorded, a request comes when it is looked up, within a step.
            if admitted is not None:
                queues.append(admitted - arrived if admitted > arrived else 0)
            if first_token is not None:
                first_tokens.append(first_token - arrived if first_token > arrived else 0)
            durations.append(time - arrived if time > arrived else 0)
            self.prefix.forget(request.number)
        for place, tokens in enumerate((prompts, outputs, computed)):
            self._tokens[place] += tokens
        self._queue.add(queues)
        self._first_token.add(first_tokens)
        self._duration.add(durations)

    def repeat(self, count: int) -> None:
        """A step that scheduled nothing was repeated."""
        self._steps[3] += count

    def content(self, rank: int, lost: Collection[str], until: int) -> totals.Engine:
        """As in ``totals.json``. ``until``: time of the session's last event."""
        self.fold()
        prefill, mixed, decode, idle = self._steps
        return {
            "engine": rank,
            "lost": sorted(lost),
            "pools": [self._pool(number, until) for number in range(len(self.pools))],
            "blocks": {
                "lifetime": self._lifetime.content(),
                "idle": self._idle.content(),
                "evictable": self._evictable.content(),
                "reuse_gap": self._reuse_gap.content(),
                "reuses": self._reuse_counts.content(),
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
            "regretted_blocks": self.regretted[number],
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

    def saved(self) -> Any:
        """What ``restore`` takes; JSON keeps it exactly."""
        self.fold()
        return {
            "pools": [pool.saved() for pool in self.pools],
            "moved": [[*key, count] for key, count in self.moved.items()],
            "resets": [[*key, count] for key, count in self.resets.items()],
            "evictions": [[*key, list(counts)] for key, counts in self._evictions.items()],
            "regretted": list(self.regretted),
            "prefix": self.prefix.saved(),
            "requests": [self.arrived, self.preemptions, self.running, self.waiting],
            "finished": dict(self._finished),
            "tokens": list(self._tokens),
            "steps": list(self._steps),
            "scheduled": list(self._scheduled),
            "histograms": [histogram.saved() for histogram in self._histograms()],
        }

    def restore(self, state: Any) -> None:
        """Go on where another one of this engine was."""
        self.fold()
        for pool, known in zip(self.pools, state["pools"], strict=True):
            pool.restore(known)
        self.moved.clear()
        self.moved.update({tuple(key): count for *key, count in state["moved"]})
        self.resets.clear()
        self.resets.update({tuple(key): count for *key, count in state["resets"]})
        self._evictions.clear()
        self._evictions.update({tuple(key): list(sums) for *key, sums in state["evictions"]})
        self.regretted = list(state["regretted"])
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
            self._lifetime,
            self._idle,
            self._evictable,
            self._reuse_gap,
            self._reuse_counts,
            self._queue,
            self._first_token,
            self._duration,
            self._schedule,
        )
