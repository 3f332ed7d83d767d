# SPDX-License-Identifier: Apache-2.0
"""What happened between two looks at a session: in the last 10 s, the last minute, and the run.

Counters only ever grow. Where one is smaller than before, another collector counts anew, or
another session has this name: what was seen before is forgotten, so that no rate is negative.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

from profilemate.live.reading import Counters, Engine, Histogram, Look, Process, Worker

WINDOWS_SEC = (10.0, 60.0)

_NO_COUNTERS = Counters()


@dataclass(frozen=True)
class Median:
    """The bin of the histogram that the median lies in: from ``from_sec`` on and below ``to_sec``,
    which is None in the last bin. Of an even number of values it is the lower one of the two in the
    middle."""

    from_sec: float
    to_sec: float | None


@dataclass(frozen=True)
class Figures:
    """What an engine did in ``seconds``, which end now.

    ``hit_rate``: of the prompt tokens of admitted requests, from 0 to 1; None where there were
    none. ``regretted_per_sec``: contents that were computed again after an eviction.
    ``never_reused``: of the evicted blocks, from 0 to 1. ``lifetime``, ``idle``: of the
    blocks that were evicted. All that ends in ``_per_sec`` is None where no time passed.
    """

    seconds: float
    hit_rate: float | None
    prompt_tokens_per_sec: float | None
    evictions_per_sec: float | None
    regretted_per_sec: float | None
    never_reused: float | None
    lifetime: Median | None
    idle: Median | None
    preemptions_per_sec: float | None
    arrived_per_sec: float | None
    ended_per_sec: float | None
    steps_per_sec: float | None
    prefill_tokens_per_sec: float | None
    decode_tokens_per_sec: float | None


@dataclass(frozen=True)
class Graphs:
    """A worker's executions that served requests, in ``seconds``. ``in_graph``: the share that
    replayed a graph; ``padding``: of the tokens that graphs computed. None where there were none.
    """

    seconds: float
    executions: int
    in_graph: float | None
    padding: float | None


@dataclass(frozen=True)
class Cost:
    """What recording took of one core, in percent: the hooks in the engine's own thread, and the
    thread that writes, which works while vLLM waits for its model."""

    hooks_pct: float
    writing_pct: float


class History:
    """The looks of the last minute at one session."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque()

    def add(self, new: Look) -> None:
        """A look was taken."""
        if self._looks and not _goes_on(self._looks[-1], new):
            self._looks.clear()
        if self._looks and new.written_ns == self._looks[-1].written_ns:
            return
        self._looks.append(new)
        # The oldest one is still needed while the next one is too young for the longest window.
        while len(self._looks) > 2 and self._age(self._looks[1]) >= WINDOWS_SEC[-1]:
            self._looks.popleft()

    def windows(self) -> list[tuple[Look, Look]]:
        """For each of ``WINDOWS_SEC`` its first and its last look; none where there is no second
        look, and none that is the same as the one before."""
        found: list[tuple[Look, Look]] = []
        if len(self._looks) < 2:
            return found
        *earlier, last = self._looks
        for seconds in WINDOWS_SEC:
            # No look was taken at the very moment: the one that is nearest.
            ages = [abs(self._age(look) - seconds) for look in earlier]
            first = earlier[ages.index(min(ages))]
            if (first, last) not in found:
                found.append((first, last))
        return found

    def _age(self, look: Look) -> float:
        """Seconds from this look to the last one."""
        return (self._looks[-1].written_ns - look.written_ns) / 1e9


def seconds_between(first: Look, last: Look) -> float:
    """The time in which what differs between two looks has happened.

    A collector that catches up counts many seconds of the session in one of its own. While vLLM has
    nothing to do, the session's last event stays where it is.
    """
    return max(last.written_ns - first.written_ns, last.until_ns - first.until_ns) / 1e9


def between(first: Look, last: Look, rank: int) -> Figures | None:
    """What an engine did between two looks; None where the last one lacks it."""
    after = _engine_of(last, rank)
    if after is None:
        return None
    return _figures(_engine_of(first, rank), after, seconds_between(first, last))


def of_run(last: Look, engine: Engine) -> Figures:
    """What an engine of the look did since the session began."""
    return _figures(None, engine, last.until_ns / 1e9)


def graphs_between(first: Look | None, last: Look, after: Worker) -> Graphs:
    """What a worker of the last look executed between two looks, or since the session began."""
    known = first.workers if first else ()
    before = next((w for w in known if w.worker == after.worker), Worker(after.worker, 0, 0, 0, 0))
    executions = after.executions - before.executions
    padded = after.padded_tokens - before.padded_tokens
    unpadded = after.unpadded_tokens - before.unpadded_tokens
    return Graphs(
        seconds=seconds_between(first, last) if first else last.until_ns / 1e9,
        executions=executions,
        in_graph=_share(after.in_graph - before.in_graph, executions),
        padding=_share(padded - unpadded, padded),
    )


def imbalance_between(first: Look | None, after: Worker) -> float | None:
    """Tokens of the busiest expert of a layer divided by the mean of its experts, on average over
    the layers, since the first look or since the session began; None where no token was routed."""
    known = first.workers if first else ()
    before = next((w.experts for w in known if w.worker == after.worker), {})
    ratios = []
    for layer, counts in after.experts.items():
        earlier = before.get(layer, ())
        earlier += (0,) * (len(counts) - len(earlier))
        news = [now - then for now, then in zip(counts, earlier, strict=True)]
        if sum(news):
            ratios.append(max(news) * len(news) / sum(news))
    return sum(ratios) / len(ratios) if ratios else None


def cost_between(first: Look, last: Look, process: Process) -> Cost | None:
    """What recording took of this process between two looks; None where no time passed."""
    seconds = seconds_between(first, last)
    before = next(
        (p for p in first.processes if (p.role, p.rank) == (process.role, process.rank)), None
    )
    if not seconds or before is None:
        return None
    return Cost(
        hooks_pct=(process.hook_ns - before.hook_ns) / seconds / 1e7,
        writing_pct=(process.writing_ns - before.writing_ns) / seconds / 1e7,
    )


def median(counts: Sequence[int], bounds: Sequence[int]) -> Median | None:
    """Where half of the values lie; None where there are none. ``bounds`` in nanoseconds."""
    middle = (sum(counts) + 1) // 2
    if not middle:
        return None
    place = bisect_left(list(accumulate(counts)), middle)
    return Median(
        from_sec=bounds[place - 1] / 1e9 if place else 0.0,
        to_sec=bounds[place] / 1e9 if place < len(bounds) else None,
    )


def _figures(before: Engine | None, after: Engine, seconds: float) -> Figures:
    then = astuple(before.counters) if before else astuple(_NO_COUNTERS)
    now = astuple(after.counters)
    did = Counters(*(new - old for new, old in zip(now, then, strict=True)))

    def a_second(count: int) -> float | None:
        return count / seconds if seconds else None

    return Figures(
        seconds=seconds,
        hit_rate=_share(did.hit_tokens, did.query_tokens),
        prompt_tokens_per_sec=a_second(did.query_tokens),
        evictions_per_sec=a_second(did.evictions),
        regretted_per_sec=a_second(did.regretted),
        never_reused=_share(did.never_reused, did.evictions - did.unknown_evictions),
        lifetime=_median(before.lifetime if before else None, after.lifetime),
        idle=_median(before.idle if before else None, after.idle),
        preemptions_per_sec=a_second(did.preemptions),
        arrived_per_sec=a_second(did.arrived),
        ended_per_sec=a_second(did.ended),
        steps_per_sec=a_second(did.steps),
        prefill_tokens_per_sec=a_second(did.prefill_tokens),
        decode_tokens_per_sec=a_second(did.decode_tokens),
    )


def _median(before: Histogram | None, after: Histogram) -> Median | None:
    if before is None:
        return median(after.counts, after.bounds)
    counts = [new - old for new, old in zip(after.counts, before.counts, strict=True)]
    return median(counts, after.bounds)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _engine_of(look: Look, rank: int) -> Engine | None:
    return next((engine for engine in look.engines if engine.engine == rank), None)


def _goes_on(old: Look, new: Look) -> bool:
    """Whether the new look is at the same session, later or at the same moment, and no counter of
    it is smaller."""
    if old.session_id != new.session_id:
        return False
    engines = {engine.engine: engine for engine in new.engines}
    workers = {worker.worker: worker for worker in new.workers}
    processes = {(process.role, process.rank): process for process in new.processes}
    pairs = [
        ((old.written_ns, old.until_ns), (new.written_ns, new.until_ns)),
        *((_counts(engine), _counts(engines.get(engine.engine))) for engine in old.engines),
        *((_executed(worker), _executed(workers.get(worker.worker))) for worker in old.workers),
        *(
            (_costs(process), _costs(processes.get((process.role, process.rank))))
            for process in old.processes
        ),
    ]
    return all(
        len(then) == len(now) and all(a <= b for a, b in zip(then, now, strict=True))
        for then, now in pairs
    )


def _counts(engine: Engine | None) -> tuple[int, ...]:
    if engine is None:
        return ()
    return (*astuple(engine.counters), *engine.lifetime.counts, *engine.idle.counts)


def _executed(worker: Worker | None) -> tuple[int, ...]:
    if worker is None:
        return ()
    executed = worker.executions, worker.in_graph, worker.padded_tokens, worker.unpadded_tokens
    # Layers come when they are first counted.
    return *executed, sum(map(sum, worker.experts.values()))


def _costs(process: Process | None) -> tuple[int, ...]:
    return (process.hook_ns, process.writing_ns) if process else ()
