# SPDX-License-Identifier: Apache-2.0
"""What hit rate would pools of other sizes and other eviction rules have had? A model, in seconds.

``curve`` needs no vLLM. It goes by the content ids alone, in the order in which requests were
admitted, one request after the other; a hit needs every block before it. Under ``lru``, blocks of
requests that ran at the same time are held as long as the session says that they ran; the other
rules evict them like any. Queueing, preemption, and prompts that are computed in several steps
while the same prompt arrives again, are not part of the model: the exact engine replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from analysis.errors import SessionError
from analysis.tables.facts import FULL_ATTENTION, Facts
from analysis.whatif import belady, ceiling, fifo, lru, policies, pools, references
from analysis.whatif.curve import BELADY, LRU, Ceiling, Curve, Holds, Point, Verdict
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
"""Every rule: what vLLM does first, the bound that none exceeds last."""

NOTHING_LOST = 0.01
"""Less than one point below the ceiling counts as nothing."""

NEARLY = 0.99
"""The share of the ceiling that counts as nearly all of it."""


def curve(
    workload: Workload, sizes: Sequence[int] | None = None, policies: Sequence[str] = POLICIES
) -> Curve:
    """The hit rates of pools of these sizes under these rules.

    Args:
        workload: of a session or a trace; ``Workload.resized`` gives one of another block size.
        sizes: in usable blocks of each engine. From a quarter to sixteen times the session's by
            default; without a session from a 64th of what is enough.
        policies: names out of ``POLICIES``.

    Raises:
        SessionError: the session does not tell the contents.

    """
    if not workload.told:
        raise SessionError(
            f"{workload.name} does not tell what its requests consisted of: prefix caching was "
            "off; record a session with it on"
        )
    engines = [references.of_workload(workload.of_engine(rank)) for rank in workload.engines]
    stacks = [lru.distances(each) for each in engines]
    most = ceiling.measure(engines)
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
        references=sum(len(each.chains.values) for each in engines),
        measured=measured.outcome if measured else None,
        ceiling=most,
        points=tuple(points[size] for size in wanted),
        at_measured=points[own] if own else None,
        enough_blocks=enough_blocks,
        nearly_blocks=_nearly(stacks, most, enough_blocks),
        notes=_notes(workload),
    )


def enough(workload: Workload) -> int:
    """``Curve.enough_blocks``, alone."""
    engines = (references.of_workload(workload.of_engine(rank)) for rank in workload.engines)
    return max((lru.distances(each).enough() for each in engines), default=0)


def _own_size(workload: Workload) -> int | None:
    """The session's own pool, where it had blocks of the same size."""
    measured = workload.measured
    if measured is None or measured.block_size != workload.block_size:
        return None
    return measured.num_blocks


def _outcomes(
    engines: Sequence[References], stacks: Sequence[Distances], policy: str, sizes: Sequence[int]
) -> list[Outcome]:
    """One for each size."""
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
    """Every content that did not find room, but for those that came while the pool filled up: it
    stays full from then on."""
    came = np.cumsum(each.chains.lengths - found)
    began = int(came[~each.counts].max(initial=0))
    return int(max(0, came[-1] - size) - max(0, began - size)) if len(came) else 0


def _point(pool: Pool, outcomes: Sequence[Outcome], most: Ceiling) -> Point:
    rates = {
        outcome.policy: outcome.hit_rate for outcome in outcomes if outcome.hit_rate is not None
    }
    return Point(pool, tuple(outcomes), _verdict(rates, most.hit_rate))


def _verdict(rates: Mapping[str, float], most: float | None) -> Verdict | None:
    if most is None or LRU not in rates or BELADY not in rates:
        return None
    to_capacity, to_policy = most - rates[BELADY], rates[BELADY] - rates[LRU]
    by: Holds = "capacity" if to_capacity >= to_policy else "policy"
    if to_capacity + to_policy < NOTHING_LOST:
        by = "workload"
    # Of equals, the first: vLLM's own.
    best = max((policy for policy in rates if policy != BELADY), key=lambda name: rates[name])
    return Verdict(by, to_capacity, to_policy, best, rates[best])


def _nearly(stacks: Sequence[Distances], most: Ceiling, enough: int) -> int:
    """By halving: a larger pool never finds less."""
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
    "A trace does not tell what its outputs consist of: they take room, and no later turn finds "
    "them."
)


def _notes(workload: Workload) -> tuple[str, ...]:
    if workload.measured is None:
        return (_OUTPUTS,)
    return tuple(_session_notes(workload.measured.facts, workload.block_size))


def _session_notes(facts: Facts, block_size: int) -> list[str]:
    notes = []
    if any(group.kind not in FULL_ATTENTION for group in facts.groups if group.kind):
        notes.append(
            "The model knows full attention alone; this engine has other KV cache groups, which "
            "let go of blocks earlier and hit by other rules."
        )
    if facts.scheduler.drops_hit_unit:
        notes.append("Speculation computes the last block of every hit anew: not modelled.")
    sizes = {group.block_size for group in facts.groups if group.block_size}
    if any(block_size % size for size in sizes):
        notes.append(
            f"The session tells contents in blocks of {min(sizes)} tokens: what two prompts share "
            f"of less than that is not known, so hits in blocks of {block_size} may be too few."
        )
    return notes
