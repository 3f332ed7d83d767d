# SPDX-License-Identifier: Apache-2.0
"""How many GPUs does a rate of requests like a session's need?

The requests of the next deployment are taken to be those of the session, to come by themselves,
and to be shared out evenly among replicas of the session's engine. A request takes as many steps as
in the session. A step takes longer the more requests run: the times are fitted to the session's
steps. So requests at once = rate x time of a request (J. D. C. Little, 1961) has one solution.
Around it the number at once is spread as Poisson's law says. A replica takes a rate where that
number stays within its places but for 1 % of the time: within ``--max-num-seqs``, and within the
requests that fit into the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.errors import RuleError
from analysis.headroom import demand, lives, together
from analysis.headroom.demand import Demand
from analysis.headroom.head_room import CHANCE, requests_at_most
from analysis.headroom.lives import Lives
from analysis.headroom.together import Together
from analysis.plan.explain import Step
from analysis.pool import usage
from analysis.pool.usable import block_size_of, usable_blocks
from analysis.prefix import prompts, reuse, stretches
from analysis.tables import facts as session_facts
from analysis.tables.facts import Facts
from analysis.tables.metadata import text
from analysis.tables.session import Session
from analysis.whatif import step_time
from analysis.whatif.clock import StepTime

FACTORS = (1.0, 2.0, 5.0, 10.0)
"""Rates that are sized where none is named, of the session's own."""
_PRECISION = 1e-4
"""A rate is found to this share of it."""


@dataclass(frozen=True)
class Replica:
    """An engine that gets ``per_sec`` requests a second: so many are there ``at_once`` on average,
    and up to ``p99_at_once`` for 99 % of the time; a request takes ``request_sec``, a step
    ``step_sec`` on average."""

    per_sec: float
    at_once: float
    p99_at_once: int
    request_sec: float
    step_sec: float


@dataclass(frozen=True)
class Size:
    """For ``per_sec`` requests a second: ``replicas`` of the engine, on ``gpus`` GPUs, and what
    each of them does."""

    per_sec: float
    replicas: int
    gpus: int
    each: Replica


@dataclass(frozen=True)
class Deployment:
    """The next deployment. ``sizes``: by rate. ``most``: what a replica takes at most.

    ``session``: the session's id. ``requests``: that it is sized by. ``per_sec``: the rate of the
    session, in an engine. ``recorded_at_once``: requests in an engine on average, from the first
    arrival to the last; ``planned_at_once``: the same as the arithmetic has it, None where the
    session's rate is more than a replica can compute. ``gpus``: of a replica. ``pool_blocks``:
    usable ones. ``max_num_seqs``: None for no limit. ``fit``: requests that fit into the pool but
    for 1 % of the time, None for more than the estimate was made for. ``places``: the smaller of
    both. ``step_time``: as fitted. ``steps``: the arithmetic. ``notes``: what to know before
    trusting it.
    """

    session: str
    requests: int
    per_sec: float | None
    recorded_at_once: float | None
    planned_at_once: float | None
    gpus: int
    pool_blocks: int
    max_num_seqs: int | None
    fit: int | None
    places: int
    step_time: StepTime
    most: Replica
    sizes: tuple[Size, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Work:
    """What a request is: ``steps``, ``prompt`` tokens that are computed and ``answer`` tokens
    beyond the first, on average; and how long a step takes."""

    steps: float
    prompt: float
    answer: float
    time: StepTime

    @property
    def each_sec(self) -> float:
        """Seconds that each running request adds to a step."""
        time = self.time
        tokens = time.prefill_token_sec * self.prompt + time.decode_token_sec * self.answer
        return tokens / self.steps + time.request_sec

    @property
    def most_per_sec(self) -> float:
        """The rate that steps full of requests cannot reach; infinite where requests cost none."""
        cost = self.steps * self.each_sec
        return 1 / cost if cost else math.inf

    def replica(self, per_sec: float) -> Replica:
        """An engine at this rate, which is below ``most_per_sec``."""
        busy = per_sec * self.steps
        at_once = busy * self.time.constant_sec / (1 - busy * self.each_sec)
        step_sec = self.time.constant_sec + at_once * self.each_sec
        return Replica(per_sec, at_once, _poisson(at_once), self.steps * step_sec, step_sec)


def measure(
    session: Session,
    *,
    per_sec: float | None = None,
    pool_blocks: int | None = None,
    max_num_seqs: int | None = None,
) -> Deployment:
    """Size the next deployment by a session.

    Args:
        session: the session.
        per_sec: requests a second; by default the session's own rate, and multiples of it.
        pool_blocks: of each engine, the null block included; by default as recorded.
        max_num_seqs: by default as recorded.

    Raises:
        RuleError: the session does not show what a request needs, or not one request fits.
        SessionError: a table of the session cannot be read.

    """
    known = session_facts.read(session)
    used = usage.measure(session)
    size, pools = block_size_of(known, used), usable_blocks(known, used)
    pool = min(pools.values(), default=0) if pool_blocks is None else pool_blocks - 1
    if size is None:
        raise RuleError(
            f"{session.directory}: a deployment is sized by one KV cache group of full attention, "
            "and this model has others; try pools with profilemate whatif"
        )
    load, mean = demand.measure(session), _lives(session, known, size)
    if not len(mean) or pool < 1:
        raise RuleError(
            f"{session.directory}: no request ended, or its pool has no blocks, so there is "
            "nothing to size a deployment by"
        )
    found = step_time.fit(session, batches=known.batches)
    if found is None:
        raise RuleError(
            f"{session.directory}: too few steps follow each other to say how long a step takes; "
            "name a session under load"
        )
    drawn = together.draw(mean, requests_at_most(mean, pool))
    limit = known.scheduler.max_num_active_seqs if max_num_seqs is None else max_num_seqs
    fit = drawn.fit(pool, CHANCE)
    places = min(drawn.most if fit is None else fit, drawn.most if limit is None else limit)
    work = _work(mean, found)
    most = _most(work, places)
    if most is None:
        raise RuleError(
            f"a pool of {pool + 1:,} blocks has no room for one request like the session's in 99 % "
            "of the time: name a larger one with --num-gpu-blocks-override"
        )
    rates = [per_sec] if per_sec else [factor * (load.per_sec or 0) for factor in FACTORS]
    gpus = (known.tensor_parallel or 1) * (known.pipeline_parallel or 1)
    sizes = tuple(_size(rate, work, most, gpus) for rate in rates if rate > 0)
    own = load.per_sec
    return Deployment(
        session=text(session.metadata.get("session_id")) or session.directory.name,
        requests=len(mean),
        per_sec=own,
        recorded_at_once=_at_once(load),
        planned_at_once=work.replica(own).at_once if own and own < work.most_per_sec else None,
        gpus=gpus,
        pool_blocks=pool,
        max_num_seqs=limit,
        fit=fit,
        places=places,
        step_time=found,
        most=most,
        sizes=sizes,
        steps=tuple(_arithmetic(work, drawn, pool, limit, fit, places, most, sizes)),
        notes=tuple(_notes(known, load, work)),
    )


def _lives(session: Session, known: Facts, block_size: int) -> Lives:
    asked = prompts.read(session)
    uses = reuse.uses(asked.without_contents(), stretches.in_common(asked))
    return lives.read(session, uses, block_size, known.scheduler)


def _work(mean: Lives, time: StepTime) -> _Work:
    return _Work(
        steps=float(mean.steps.mean()),
        prompt=float(mean.computed.mean()),
        answer=float(mean.answer_steps.mean()),
        time=time,
    )


def _at_once(load: Demand) -> float | None:
    """Requests in an engine on average, by Little's law: the rate x the time of a request."""
    if load.per_sec is None or not len(load.at_arrival):
        return None
    return load.per_sec * float((load.at_once * load.seconds).sum()) / len(load.at_arrival)


def _poisson(mean: float) -> int:
    """The least number that a Poisson variable exceeds with a chance of at most 1 %."""
    end = math.ceil(mean + 10 * math.sqrt(mean) + 10)
    counts = np.arange(1, end + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(max(mean, 1e-300) / counts))]) - mean
    return int(np.searchsorted(np.cumsum(np.exp(logs)), 1 - CHANCE))


def _most(work: _Work, places: int) -> Replica | None:
    """The highest rate at which the requests at once stay within the places, but for 1 % of the
    time; None where there is no place."""
    if places < 1:
        return None
    low, high = 0.0, min(work.most_per_sec, places / (work.steps * work.time.constant_sec or 1e-9))
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        fits = middle < work.most_per_sec and work.replica(middle).p99_at_once <= places
        low, high = (middle, high) if fits else (low, middle)
    return work.replica(low) if low else None


def _size(per_sec: float, work: _Work, most: Replica, gpus: int) -> Size:
    replicas = max(1, math.ceil(per_sec / most.per_sec))
    return Size(per_sec, replicas, replicas * gpus, work.replica(per_sec / replicas))


def _arithmetic(
    work: _Work,
    drawn: Together,
    pool: int,
    limit: int | None,
    fit: int | None,
    places: int,
    most: Replica,
    sizes: tuple[Size, ...],
) -> list[Step]:
    time, recorded = work.time, "the session's requests"
    first = [
        Step(
            "Steps of a request",
            f"{work.steps - work.answer:,.2f} of its prompt + {work.answer:,.2f} of its answer",
            work.steps,
            "steps",
            recorded,
        ),
        Step(
            "A running request adds to a step",
            f"({work.prompt:,.1f} prompt tokens x {1e6 * time.prefill_token_sec:,.3f} us + "
            f"{work.answer:,.1f} answer tokens x {1e6 * time.decode_token_sec:,.3f} us) / "
            f"{work.steps:,.2f} steps + {1e6 * time.request_sec:,.3f} us",
            1e6 * work.each_sec,
            "us",
            "fitted to the session's steps",
        ),
        Step(
            "Requests that fit",
            f"blocks of so many requests > {pool:,} for up to 1 % of the time",
            drawn.most if fit is None else fit,
            "requests",
            f"{drawn.draws:,} draws of {recorded}",
        ),
        Step(
            "Places",
            f"the smaller of these and max_num_seqs {'n/a' if limit is None else f'{limit:,}'}",
            places,
            "requests",
            "metadata.json",
        ),
        Step(
            "A step with the places in use",
            f"{1e6 * time.constant_sec:,.3f} us for each step + {most.at_once:,.2f} at once on "
            f"average x {1e6 * work.each_sec:,.3f} us",
            1e6 * most.step_sec,
            "us",
            "fitted to the session's steps",
        ),
        Step(
            "A request then",
            f"{work.steps:,.2f} steps x {1e6 * most.step_sec:,.3f} us",
            most.request_sec,
            "s",
            "",
        ),
        Step(
            "A replica takes at most",
            f"{most.at_once:,.2f} at once on average, so up to {most.p99_at_once:,} for 99 % of "
            f"the time, which have places; / {most.request_sec:,.3f} s of a request",
            most.per_sec,
            "requests/s",
            "Little's law, Poisson's law",
        ),
    ]
    return first + [
        Step(
            f"Replicas for {size.per_sec:,.3f} requests/s",
            f"{size.per_sec:,.3f} / {most.per_sec:,.3f}, rounded up",
            size.replicas,
            "replicas",
            "",
        )
        for size in sizes
    ]


def _notes(known: Facts, load: Demand, work: _Work) -> list[str]:
    notes = [
        "Requests come by themselves. Where they come in bursts, more are there at once.",
        "The rate has to be that of the busiest time.",
        "A step's time does not depend on how long its requests' contexts are.",
    ]
    if known.prefix_caching is not False:
        notes.append(
            "Each replica finds as much in its cache as the session's engine did. With more "
            "replicas, requests that share a prefix have to be sent to the same one."
        )
    if known.scheduler.speculative_tokens:
        notes.append("With speculation a step gives several tokens; here each token is a step.")
    recorded = _at_once(load)
    own = load.per_sec
    if recorded and own and own < work.most_per_sec:
        planned = work.replica(own).at_once
        if not 0.8 <= planned / recorded <= 1.25:
            notes.append(
                f"At the session's own rate the arithmetic has {planned:,.2f} requests at once, "
                f"and the session had {recorded:,.2f}: it waited, or its load was not even."
            )
    return notes
