# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler really does with the trace, and the session that is left of it.

The loop, the steps' times and the counting are not those of the simulation. The oracle counts
within vLLM's classes. A step's time is a rule of the simulated device, which the session shows by
its timestamps alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profilemate import collector
from tests.kv.recording import Clock, only_session, recorded
from tests.support.oracle import FIRST, RESUMED, RETRY, Oracle
from tests.support.scheduler import ANSWER, RequestMaker, answer, build_scheduler, trace_requests

if TYPE_CHECKING:
    from tests.whatif.offloading import ClockedWorker

ROUNDED_MS = 1e-6

WALK_EVERY = 10**9
"""The oracle need not walk through the pool."""


@dataclass(frozen=True)
class Truth:
    """What was counted within vLLM, and where the session lies. ``host_tokens``: found by a KV
    connector for requests that run for the first time."""

    session: Path
    query_tokens: int
    hit_tokens: int
    evictions: int
    preemptions: int
    steps: int
    recomputed_tokens: int
    host_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens


def steady(output: Any) -> float:
    """A device whose steps all take 30 ms."""
    return 0.03


def device(output: Any) -> float:
    """A device whose steps take longer the more they compute."""
    tokens = output.total_num_scheduled_tokens
    requests = len(output.num_scheduled_tokens)
    return 0.008 + 25e-6 * tokens + 150e-6 * requests


def run(
    model: Path,
    folder: Path,
    blocks: int,
    *,
    limit: int | None = None,
    step_sec: Callable[[Any], float] = steady,
    block_size: int = 16,
    abort: Callable[[Any, int], list[str]] = lambda scheduler, step: [],
    requests: Iterable[tuple[float, Any]] | None = None,
    batches: int = 1,
    then: Callable[[str], list[tuple[float, Any]]] = lambda name: [],
    drafts: Drafts | None = None,
    worker: ClockedWorker | None = None,
    **arguments: Any,
) -> Truth:
    """Drive a scheduler over so many blocks as vLLM counts them, and record it into ``folder``.

    ``requests`` are the trace's, unless given; ``abort`` names those that are aborted before a
    step, whose number it is given. ``batches`` are in flight at once. ``then`` says what comes
    after a request has ended, and how many ms after it. ``worker`` copies for a KV connector.
    """
    folder.mkdir(parents=True)
    clock = Clock()
    with recorded(folder, clock, walk_every=WALK_EVERY) as oracle:
        scheduler = build_scheduler(model, blocks, block_size=block_size, **arguments)
        arrivals = list(requests or trace_requests(RequestMaker(block_size), limit))
        _drive(scheduler, arrivals, clock, step_sec, abort, batches, then, drafts, worker)
    session = only_session(folder)
    collector.finalize(session)
    return _counted(session, oracle, worker.hits if worker else 0)


@dataclass
class Drafts:
    """A drafter of ``tokens`` for each step, each of which is accepted with this chance if those
    before it are. Which ones are depends on the answer alone, as a model's would."""

    tokens: int
    chance: float

    def sampled(self, scheduler: Any, output: Any) -> frozenset[str]:
        """The requests that get tokens in this step."""
        return frozenset(
            name
            for name in output.num_scheduled_tokens
            if scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens
        )

    def answer(self, scheduler: Any, output: Any, sampled: frozenset[str]) -> Any:
        """What the model returns: its own token, and the drafts that it accepts."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = scheduler.requests.get(name)
            count = 1 if name in sampled else 0
            if count and request is not None and request.num_output_tokens:
                chance = random.Random(f"{name} {request.num_output_tokens}")
                for _ in output.scheduled_spec_decode_tokens.get(name, ()):
                    if chance.random() > self.chance:
                        break
                    count += 1
            tokens.append([ANSWER] * count)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=tokens,
        )

    def propose(self, scheduler: Any, output: Any) -> None:
        """Draft for the next step."""
        from vllm.v1.outputs import DraftTokenIds

        names = list(output.num_scheduled_tokens)
        scheduler.update_draft_token_ids(
            DraftTokenIds(names, [[ANSWER] * self.tokens] * len(names))
        )


def _drive(
    scheduler: Any,
    arrivals: list[tuple[float, Any]],
    clock: Clock,
    step_sec: Callable[[Any], float],
    abort: Callable[[Any, int], list[str]],
    batches: int,
    then: Callable[[str], list[tuple[float, Any]]],
    drafts: Drafts | None,
    worker: ClockedWorker | None,
) -> None:
    from vllm.v1.request import RequestStatus

    origin, now, pending, step = clock.now, 0.0, arrivals[::-1], 0
    flight: deque[tuple[Any, Any, float]] = deque()
    # An engine goes on while its connector has something to do.
    has_work = scheduler.has_requests if worker else scheduler.has_unfinished_requests
    while pending or flight or has_work():
        if not flight and not has_work():
            now = max(now, pending[-1][0] / 1e3)
        clock.now = max(clock.now, origin + round(now * 1e9))
        while pending and pending[-1][0] <= now * 1e3 + ROUNDED_MS:
            # As in an engine, no two arrive in the same microsecond: that gives their order.
            clock.tick(1)
            scheduler.add_request(pending.pop()[1])
        for name in abort(scheduler, step):
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        step += 1
        if has_work():
            output = scheduler.schedule()
            if drafts is None:
                flight.append((output, answer(scheduler, output), now))
            else:
                flight.append((output, drafts.sampled(scheduler, output), now))
            if len(flight) < batches:
                continue
        output, answered, launched = flight.popleft()
        seconds = step_sec(output) if output.total_num_scheduled_tokens else 0.0
        now = worker.run(output, launched, now, seconds) if worker else now + seconds
        clock.now = max(clock.now, origin + round(now * 1e9))
        if drafts is not None:
            answered = drafts.answer(scheduler, output, answered)
        if worker is not None:
            answered.kv_connector_output = worker.report
        told = scheduler.update_from_output(output, answered)
        if worker is not None:
            arrivals_sec = [at / 1e3 for at, _ in pending[-1:]]
            now = worker.rest(told, [output, *(step for step, *_ in flight)], arrivals_sec, now)
        if drafts is not None and not scheduler.scheduler_config.async_scheduling:
            drafts.propose(scheduler, output)
        ended = [name for name in output.num_scheduled_tokens if name not in scheduler.requests]
        pending += [(1e3 * now + after, request) for name in ended for after, request in then(name)]
        pending.sort(key=lambda pair: -pair[0])


def _counted(session: Path, oracle: Oracle, host_tokens: int) -> Truth:
    def again(lookup: Any) -> bool:
        return bool(lookup.admitted) and lookup.kind == RESUMED

    true = [
        lookup for lookup in oracle.lookups if lookup.admitted and lookup.kind in (FIRST, RETRY)
    ]
    return Truth(
        session=session,
        query_tokens=sum(lookup.query for lookup in true),
        hit_tokens=sum(lookup.hit for lookup in true),
        evictions=len(oracle.evictions),
        preemptions=sum(life.preemptions for life in oracle.lives.values()),
        steps=sum(step.scheduled > 0 for step in oracle.steps),
        recomputed_tokens=sum(life.wasted for life in oracle.lives.values())
        - sum(lookup.hit for lookup in oracle.lookups if again(lookup)),
        host_tokens=host_tokens,
    )
