# SPDX-License-Identifier: Apache-2.0
"""Which of the conditions of VLLM_PROFILING_SNAPSHOT_WHEN has an engine just met?

At each whole second of the session every condition takes what it needs of the engine's totals, so
nothing is done for an event. ``docs/snapshot.md`` says what each measure means.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from profilemate.collector.engine import Engine
from profilemate.collector.engine_totals import EngineTotals
from profilemate.collector.follower import Follower
from profilemate.format.when import PERCENT, Condition

SECOND_NS = 1_000_000_000

LEAST_TOKENS = 10_000
"""Where prompts of fewer tokens were looked up, the hit rate says nothing: the engine is idle."""

_LATER = 20
"""Where more than one in so many are above the 95th percentile's limit, so is the percentile."""


@dataclass(frozen=True)
class Reading:
    """What one engine has at a whole second. All but ``held`` and ``waits`` count from its start.

    ``held``: the least and the most blocks that requests held at once in the last second, by pool,
    and the pool's blocks; empty before the first step. ``waits`` are nanoseconds: of the requests
    that were first admitted in the last second, and so far of those that never were. ``lost``:
    parts of the recording that have ended.
    """

    preemptions: int
    held: tuple[tuple[int, int, int], ...]
    asked_tokens: int
    hit_tokens: int
    admitted_ns: Sequence[int]
    waiting_ns: Sequence[int]
    resets: int
    lost: frozenset[str]


class Measure(Protocol):
    """Follows one condition of one engine."""

    def met(self, reading: Reading) -> str | None:
        """What was found, in words, if the condition is met now; else None."""


class Preemptions:
    """How many were there?"""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._counts: deque[int] = deque(maxlen=condition.seconds + 1)

    def met(self, reading: Reading) -> str | None:
        if "frees" in reading.lost:
            self._counts.clear()
            return None
        self._counts.append(reading.preemptions)
        count = self._counts[-1] - self._counts[0]
        if len(self._counts) < self._condition.seconds + 1 or not _beyond(self._condition, count):
            return None
        return f"{count:,}"


class Usage:
    """Was some pool so full, or so empty, all the time?"""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._seconds: list[int] = []
        self._worst: list[float] = []

    def met(self, reading: Reading) -> str | None:
        """A pool of no blocks is never full, and never empty."""
        if "blocks" in reading.lost:
            self._seconds = []
            return None
        if len(self._seconds) != len(reading.held):
            # The second before the first reading is not known.
            self._seconds = [-1] * len(reading.held)
            self._worst = [0.0] * len(reading.held)
        above, limit = self._condition.above, self._condition.limit
        whole = 100 * PERCENT
        for number, (least, most, total) in enumerate(reading.held):
            blocks = least if above else most
            scaled = whole * blocks
            fits = scaled >= limit * total if above else scaled <= limit * total
            if self._seconds[number] < 0 or not (total and fits):
                self._seconds[number] = 0
                self._worst[number] = math.inf if above else -math.inf
                continue
            share = 100 * blocks / total
            self._seconds[number] += 1
            worst = self._worst[number]
            self._worst[number] = min(worst, share) if above else max(worst, share)
        for number, seconds in enumerate(self._seconds):
            if seconds >= self._condition.seconds:
                where = f" in pool {number}" if len(self._seconds) > 1 else ""
                return f"{'at least' if above else 'at most'} {self._worst[number]:.2f} %{where}"
        return None


class HitRate:
    """Which share of the prompts' tokens came out of the prefix cache?"""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._tokens: deque[tuple[int, int]] = deque(maxlen=condition.seconds + 1)

    def met(self, reading: Reading) -> str | None:
        if "lookups" in reading.lost:
            self._tokens.clear()
            return None
        self._tokens.append((reading.asked_tokens, reading.hit_tokens))
        asked, hit = (self._tokens[-1][place] - self._tokens[0][place] for place in (0, 1))
        if len(self._tokens) < self._condition.seconds + 1 or asked < LEAST_TOKENS:
            return None
        scaled, limit = 100 * PERCENT * hit, self._condition.limit * asked
        if not (scaled > limit if self._condition.above else scaled < limit):
            return None
        return f"{100 * hit / asked:.2f} % of {asked:,} tokens"


class Queue:
    """How long did requests wait for their admission?"""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._admitted: deque[tuple[int, int]] = deque(maxlen=condition.seconds + 1)
        """Requests that were admitted so far, and those of them that waited longer."""

    def met(self, reading: Reading) -> str | None:
        if {"requests", "lookups"} & reading.lost:
            self._admitted.clear()
            return None
        before = self._admitted[-1] if self._admitted else (0, 0)
        longer = self._longer(reading.admitted_ns)
        self._admitted.append((before[0] + len(reading.admitted_ns), before[1] + longer))
        if len(self._admitted) < self._condition.seconds + 1:
            return None
        count, longer = (self._admitted[-1][place] - self._admitted[0][place] for place in (0, 1))
        count += len(reading.waiting_ns)
        longer += self._longer(reading.waiting_ns)
        # The percentile is the wait that at least 95 in 100 do not exceed.
        is_above = longer > count // _LATER
        if not count or is_above is not self._condition.above:
            return None
        return f"{longer:,} of {count:,} requests waited {'longer' if is_above else 'that long'}"

    def _longer(self, waits: Sequence[int]) -> int:
        limit = self._condition.limit
        if self._condition.above:
            return sum(wait > limit for wait in waits)
        return sum(wait >= limit for wait in waits)


class Reset:
    """Was a prefix cache dropped?"""

    def __init__(self, condition: Condition) -> None:
        self._resets: int | None = None

    def met(self, reading: Reading) -> str | None:
        before, self._resets = self._resets, reading.resets
        return "its prefix cache was dropped" if before not in (None, reading.resets) else None


_MEASURES: dict[str, type[Preemptions | Usage | HitRate | Queue | Reset]] = {
    "preemptions": Preemptions,
    "usage": Usage,
    "hit_rate": HitRate,
    "queue_p95": Queue,
    "reset": Reset,
}

CRASH = "crash"


@dataclass
class _Followed:
    """A condition of one engine. ``is_met``: at the last reading, if that was to fire."""

    condition: Condition
    measure: Measure
    is_met: bool = False


class Triggers:
    """The conditions, for all engines of a session.

    A condition fires for an engine when it is met, and was not at the second before. While the
    recording of an engine is paused nothing fires, and after it an engine is judged as a new one.
    """

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._conditions = [each for each in conditions if each.measure != CRASH]
        self._waits = any(each.measure == "queue_p95" for each in conditions)
        self._looks_for_crashes = any(each.measure == CRASH for each in conditions)
        self._engines: dict[int, list[_Followed]] = {}
        self._turns: dict[int, int] = {}
        self._living: set[str] = set()

    @property
    def reads(self) -> bool:
        """Whether there is anything to read once a second."""
        return bool(self._conditions or self._looks_for_crashes)

    def read(self, follower: Follower, time: int, *, fires: bool = True) -> list[str]:
        """What fires, in words, at this whole second. All events up to it have been applied, and no
        later one. Unless it ``fires``, nothing does, and what is met later counts as new."""
        fired = []
        for producer in follower.ordered():
            engine = producer.state
            if isinstance(engine, Engine) and self._conditions:
                if self._turns.get(engine.rank) != engine.pauses.turns:
                    # What came before a pause says nothing of what comes after it.
                    self._turns[engine.rank] = engine.pauses.turns
                    self._engines.pop(engine.rank, None)
                if engine.pauses.is_now:
                    continue
                if engine.rank not in self._engines:
                    self._engines[engine.rank] = [
                        _Followed(each, _MEASURES[each.measure](each)) for each in self._conditions
                    ]
                lost = frozenset(producer.lost)
                reading = read(engine, lost, follower, time, waits=self._waits)
                fired += self._fired(engine.rank, reading, fires)
        crashed = self.crashes(follower)
        return fired + crashed if fires else []

    def _fired(self, rank: int, reading: Reading, fires: bool) -> list[str]:
        fired = []
        for followed in self._engines[rank]:
            found = followed.measure.met(reading)
            if found is not None and not followed.is_met:
                fired.append(f"{followed.condition.text}: {found} on engine {rank}")
            followed.is_met = found is not None and fires
        return fired

    def crashes(self, follower: Follower) -> list[str]:
        """The engines that are gone without their end since the last call, and of which all is
        applied that they wrote. One that was gone at the first call is not among them."""
        if not self._looks_for_crashes:
            return []
        fired = []
        for producer in follower.ordered():
            engine = producer.state
            if not isinstance(engine, Engine) or producer.ended_well:
                continue
            if producer.alive:
                self._living.add(producer.name)
            elif producer.name in self._living and producer.exhausted and not producer.episodes:
                self._living.remove(producer.name)
                fired.append(f"{CRASH}: engine {engine.rank} is gone")
        return fired

    def waits_for(self, follower: Follower) -> bool:
        """Whether an engine is gone that the next call of ``crashes`` may name."""
        return self._looks_for_crashes and any(
            producer.name in self._living and not producer.ended_well and not producer.alive
            for producer in follower.ordered()
        )


def read(
    engine: Engine, lost: frozenset[str], follower: Follower, time: int, *, waits: bool
) -> Reading:
    """What the engine has now. ``waits``: also how long requests waited, from now on."""
    totals = follower.totals.engines[engine.rank]
    asked, hit = totals.prefix.tokens
    admitted_ns: list[int] = []
    if waits:
        admitted_ns, totals.waits = totals.waits or [], []
    return Reading(
        preemptions=totals.preemptions,
        held=_held(totals),
        asked_tokens=asked,
        hit_tokens=hit,
        admitted_ns=admitted_ns,
        waiting_ns=engine.waiting_ns(time) if waits else (),
        resets=sum(count for (_, is_done), count in totals.resets.items() if is_done),
        lost=lost,
    )


def _held(totals: EngineTotals) -> tuple[tuple[int, int, int], ...]:
    """As in ``Reading``."""
    extremes = [(*pool.extremes(), pool.total) for pool in totals.pools]
    return tuple(extremes) if all(pool.since is not None for pool in totals.pools) else ()


def _beyond(condition: Condition, value: float) -> bool:
    return value > condition.limit if condition.above else value < condition.limit
