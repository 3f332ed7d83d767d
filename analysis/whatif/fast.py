# SPDX-License-Identifier: Apache-2.0
"""What hit rate would pools of other sizes and other eviction rules have had? A model, in seconds.

``curve`` needs no vLLM. It takes the content ids of one request after the other, in the order of
their admission; a hit needs every block before it. Under ``lru``, requests that ran at the same
time hold their blocks as long as the session says that they ran; the other rules may evict these,
too. The model leaves queueing and preemption out, and prompts that arrive again while the same
prompt is being computed: the exact engine simulates these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from analysis.errors import SessionError
from analysis.tables.facts import FULL_ATTENTION, Facts
from analysis.whatif import belady, ceiling, fifo, lru, policies, pools, references
from analysis.whatif.curve import BELADY, LRU, Ceiling, Curve, Holds, Point, Verdict
from analysis.whatif.drops import Drops
from analysis.whatif.ids import Ints
from analysis.whatif.lru import Distances
from analysis.whatif.outcome import Outcome
from analysis.whatif.pools import Pool
from analysis.whatif.references import References
from analysis.whatif.workload import Workload

Find = Callable[[References, Sequence[int]], list[Ints]]

_RULES: Mapping[str, Find] = {
    "fifo": fifo.found,
    "lfu": partial(policies.found, rule=policies.Lfu),
    "arc": partial(policies.found, rule=policies.Arc),
    "s3-fifo": partial(policies.found, rule=policies.S3Fifo),
    "sieve": partial(policies.found, rule=policies.Sieve),
    BELADY: belady.found,
}

POLICIES = (LRU, *_RULES)
"""Every rule: vLLM's first, and last the bound for all of them."""

MOST_MADE_UP = 1 << 21
"""Blocks without recorded contents that can be modelled in a minute, under all rules."""

NOTHING_LOST = 0.01
"""A loss of less than this share of the prompt tokens counts as none."""

NEARLY = 0.99
"""From this share of the ceiling on, a pool finds nearly all."""


def curve(
    workload: Workload, sizes: Sequence[int] | None = None, policies: Sequence[str] = POLICIES
) -> Curve:
    """The hit rates of pools of these sizes under these rules.

    Args:
        workload: of a session or a trace; ``Workload.resized`` gives one of another block size.
        sizes: in usable blocks of each engine; by default from a quarter to sixteen times the
            session's pool, and for a trace from a 64th of the pool that finds everything.
        policies: names out of ``POLICIES``.

    Raises:
        SessionError: the contents of the requests are not known, or of too many blocks.

    """
    check(workload)
    engines = [references.of_workload(workload.of_engine(rank)) for rank in workload.engines]
    stacks = [lru.distances(each) for each in engines]
    most = ceiling.measure(engines)
    if len(workload.drops):
        kept = replace(workload, drops=Drops())
        most = ceiling.with_dropped(
            most, [references.of_workload(kept.of_engine(rank)) for rank in workload.engines]
        )
    enough_blocks = max((stack.enough() for stack in stacks), default=0)
    measured = workload.measured
    if sizes is None and measured is not None:
        sizes = pools.sizes(measured, workload.block_size)
    wanted = sorted(set(sizes or pools.fractions(enough_blocks)))
    own = _own_size(workload)
    every = sorted({*wanted, *((own,) if own else ())})
    found = {policy: _outcomes(engines, stacks, policy, every) for policy in policies}
    points = {
        pool.num_blocks: _point(pool, [found[policy][at] for policy in policies], most)
        for at, pool in enumerate(pools.describe(every, measured, workload.block_size))
    }
    return Curve(
        name=workload.name,
        block_size=workload.block_size,
        engines=len(engines),
        warm_up=int((~workload.counts).sum()),
        references=sum(len(each.chains.values) for each in engines),
        measured=measured.outcome if measured else None,
        ceiling=most,
        points=tuple(points[size] for size in wanted),
        at_measured=points[own] if own else None,
        enough_blocks=enough_blocks,
        nearly_blocks=_nearly(stacks, most, enough_blocks),
        notes=_notes(workload),
    )


def of_pools(workload: Workload) -> Callable[[int], Outcome]:
    """What vLLM's rule finds in a pool of so many usable blocks, for one size after the other.

    Raises:
        SessionError: as ``curve`` does.

    """
    check(workload)
    engines = [references.of_workload(workload.of_engine(rank)) for rank in workload.engines]
    stacks = [lru.distances(each) for each in engines]
    return lambda size: _outcomes(engines, stacks, LRU, (size,))[0]


def check(workload: Workload) -> None:
    """Raise a SessionError where the contents are not known, or of too many blocks."""
    if not workload.has_contents and workload.measured is None:
        raise SessionError(
            f"{workload.name} has lengths and times of its requests, and no contents, so a cache "
            "cannot be modelled; without --fast, vLLM's scheduler shows queues and preemptions"
        )
    if not workload.has_contents:
        raise SessionError(
            f"{workload.name} does not have the contents of its requests, since prefix caching "
            "was off; record a session with it on"
        )
    if workload.made_up > MOST_MADE_UP:
        raise SessionError(
            f"{workload.name}: its requests have {workload.made_up:,} blocks whose contents are "
            f"not recorded, and the model takes {MOST_MADE_UP:,}; take fewer requests, and repair "
            "a length that makes no sense"
        )


def enough(workload: Workload) -> int:
    """``Curve.enough_blocks``, without the rest of the curve."""
    engines = (references.of_workload(workload.of_engine(rank)) for rank in workload.engines)
    return max((lru.distances(each).enough() for each in engines), default=0)


def _own_size(workload: Workload) -> int | None:
    """The size of the session's own pool, if its blocks had the same size; else None."""
    measured = workload.measured
    if measured is None or measured.block_size != workload.block_size:
        return None
    return measured.num_blocks


def _outcomes(
    engines: Sequence[References], stacks: Sequence[Distances], policy: str, sizes: Sequence[int]
) -> list[Outcome]:
    """The outcome of this rule for each size."""
    if policy == LRU:
        by_engine = [[stack.found(size) for size in sizes] for stack in stacks]
    else:
        by_engine = [_RULES[policy](each, sizes) for each in engines]
    return [
        _outcome(engines, [found[at] for found in by_engine], policy, size)
        for at, size in enumerate(sizes)
    ]


def _outcome(
    engines: Sequence[References], found: Sequence[Ints], policy: str, size: int
) -> Outcome:
    pairs = list(zip(engines, found, strict=True))
    return Outcome(
        engine="fast",
        label=f"{size:,} blocks, {policy}",
        num_blocks=size,
        block_size=engines[0].block_size,
        policy=policy,
        requests=sum(int(each.counts.sum()) for each in engines),
        query_tokens=sum(int(each.input_tokens[each.counts].sum()) for each in engines),
        hit_tokens=sum(int(own[each.counts].sum()) * each.block_size for each, own in pairs),
        evictions=sum(_evictions(each, own, size) for each, own in pairs),
        failed_requests=sum(int((each.needs[each.counts] > size).sum()) for each in engines),
    )


def _evictions(each: References, found: Ints, size: int) -> int:
    """Evictions after the warm-up: once the pool is full, one for each content that comes in. A
    reset leaves an empty pool, and is none."""
    is_warm_up, evictions = ~(each.counts | each.again), 0
    for epoch in np.unique(each.epoch):
        own = each.epoch == epoch
        came = np.cumsum((each.chains.lengths - found)[own])
        began = int(came[is_warm_up[own]].max(initial=0))
        evictions += int(max(0, came[-1] - size) - max(0, began - size))
    return evictions


def _point(pool: Pool, outcomes: Sequence[Outcome], most: Ceiling) -> Point:
    rates = {
        outcome.policy: outcome.hit_rate for outcome in outcomes if outcome.hit_rate is not None
    }
    return Point(pool, tuple(outcomes), _verdict(rates, most))


def _verdict(rates: Mapping[str, float], ceiling: Ceiling) -> Verdict | None:
    most = ceiling.hit_rate
    if most is None or LRU not in rates or BELADY not in rates:
        return None
    to_capacity, to_policy = most - rates[BELADY], rates[BELADY] - rates[LRU]
    by: Holds = "capacity" if to_capacity >= to_policy else "policy"
    dropped = ceiling.dropped_tokens / ceiling.query_tokens
    if dropped >= max(NOTHING_LOST, to_capacity + to_policy):
        by = "resets"
    elif to_capacity + to_policy < NOTHING_LOST:
        by = "workload"
    # The first one of equals, as vLLM's rule comes first.
    best = max((policy for policy in rates if policy != BELADY), key=lambda name: rates[name])
    return Verdict(by, to_capacity, to_policy, best, rates[best])


def _nearly(stacks: Sequence[Distances], most: Ceiling, enough: int) -> int:
    """The smallest pool that finds nearly all, by bisection: a larger pool never finds less."""
    wanted = NEARLY * (most.within_tokens + most.across_tokens)
    low, high = 0, enough
    while low < high:
        size = (low + high) // 2
        if _hit_tokens(stacks, size) >= wanted:
            high = size
        else:
            low = size + 1
    return high


def _hit_tokens(stacks: Sequence[Distances], size: int) -> int:
    return sum(
        int(stack.found(size)[stack.references.counts].sum()) * stack.references.block_size
        for stack in stacks
    )


_OUTPUTS = (
    "A trace does not have the contents of its answers: they take room, and no later turn finds "
    "them."
)


def _notes(workload: Workload) -> tuple[str, ...]:
    notes = [f"{note[0].upper()}{note[1:]}." for note in workload.notes]
    if workload.measured is None:
        return (_OUTPUTS, *notes)
    return (*notes, *session_notes(workload.measured.facts, workload.block_size))


def session_notes(facts: Facts, block_size: int) -> list[str]:
    """What the model leaves out of a session with these facts, a sentence each."""
    notes = []
    if any(group.kind not in FULL_ATTENTION for group in facts.groups if group.kind):
        notes.append(
            "The model knows full attention only; this engine has other KV cache groups, which "
            "free blocks earlier and hit by other rules."
        )
    if facts.scheduler.drops_hit_unit:
        notes.append("The model leaves out that speculation computes the last block of a hit anew.")
    sizes = {group.block_size for group in facts.groups if group.block_size}
    if any(block_size % size for size in sizes):
        notes.append(
            f"Contents are known in blocks of {min(sizes)} tokens: what two prompts share within "
            f"such a block is not known, so hits in blocks of {block_size} may be too few."
        )
    return notes
