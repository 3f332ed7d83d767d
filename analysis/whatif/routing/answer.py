# SPDX-License-Identifier: Apache-2.0
"""What do several replicas find under each rule, and how even is their load?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from analysis.errors import SessionError
from analysis.whatif import ceiling, fast, references
from analysis.whatif.clock import DEFAULT_SEC
from analysis.whatif.ids import Ints
from analysis.whatif.outcome import SAYS
from analysis.whatif.routing.replay import Asked, Replayed, asked, replay
from analysis.whatif.routing.replicas import NO_LABEL, Recorded
from analysis.whatif.routing.rules import RULES, Bounds, as_recorded
from analysis.whatif.users import Turns
from analysis.whatif.workload import Bools, Floats, Workload

StickyBy = Literal["conversation", "salt", "label"]

STICKY_BY: tuple[StickyBy, ...] = ("conversation", "salt", "label")

POLICIES = tuple(RULES)


@dataclass(frozen=True)
class Share:
    """One replica's part. ``requests``: that it got; ``computed_tokens``: of their prompts and
    answers, without what was found; ``running``: how many of them it had at once, on average over
    the time from the first arrival to the last end; ``peak``: and at most."""

    requests: int
    computed_tokens: int
    running: float
    peak: int


@dataclass(frozen=True)
class Balance:
    """The largest share of a replica, as a multiple of the mean: 1 is even. None without a load."""

    requests: float | None
    computed_tokens: float | None
    running: float | None


@dataclass(frozen=True)
class Routed:
    """What came of one rule, of the requests that count.

    ``policy``: its name. ``says``: ``measured`` or ``modelled``. ``requests``; ``query_tokens``: of
    their prompts; ``hit_tokens``: found there; ``elsewhere_tokens``: that had to be computed
    although another replica had them at that moment; ``evictions``: for room, of the whole run.
    The last two are None where they are not known.

    ``hit_rate``: of tokens asked for, those found; ``elsewhere_rate``: those lost to the other
    replicas; None where none were asked for. ``balance``: follows from ``replicas``.
    """

    policy: str
    says: str
    requests: int
    query_tokens: int
    hit_tokens: int
    elsewhere_tokens: int | None
    evictions: int | None
    replicas: tuple[Share, ...]

    hit_rate: float | None = field(init=False)
    elsewhere_rate: float | None = field(init=False)
    balance: Balance = field(init=False)

    def __post_init__(self) -> None:
        set_it = object.__setattr__
        set_it(self, "hit_rate", _over(self.hit_tokens, self.query_tokens))
        lost = self.elsewhere_tokens
        set_it(self, "elsewhere_rate", None if lost is None else _over(lost, self.query_tokens))
        shares = self.replicas
        set_it(
            self,
            "balance",
            Balance(
                _largest([one.requests for one in shares]),
                _largest([one.computed_tokens for one in shares]),
                _largest([one.running for one in shares]),
            ),
        )


@dataclass(frozen=True)
class Routing:
    """What was found.

    ``name``: of the session or trace; of several sessions, the first one's. ``replicas``: their
    names, if they are the recorded ones, else numbers. ``num_blocks``: usable blocks of each;
    ``block_size``: in tokens. ``warm_up``: requests that do not count. ``never_admitted``: requests
    that are left out. ``step_sec``: time for each token of an answer, None where the requests take
    as long as was recorded. ``sticky_by``: what the rule ``sticky`` goes by; ``keys``: how many of
    these there are. ``bounds``: of the rules that go by what is cached.

    ``measured``: what really was; ``as_recorded``: the model with the recorded routing, by which to
    judge it; both None where these are not the recorded replicas. ``policies``: each rule.
    ``one_cache``: the same requests in one cache that is as large as all replicas' together.
    """

    name: str
    replicas: tuple[str, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    warm_up: int
    never_admitted: int
    step_sec: float | None
    sticky_by: StickyBy
    keys: int
    bounds: Bounds
    measured: Routed | None
    as_recorded: Routed | None
    policies: tuple[Routed, ...]
    one_cache: Routed
    notes: tuple[str, ...]


def routed(
    recorded: Recorded,
    *,
    policies: Sequence[str] = POLICIES,
    sizes: Sequence[int] | None = None,
    bounds: Bounds | None = None,
    sticky_by: StickyBy = "conversation",
    step_sec: float | None = None,
    progress: Callable[[str], None] = lambda policy: None,
) -> Routing:
    """Replay the requests of these replicas under each rule.

    Args:
        recorded: the requests.
        policies: names out of ``POLICIES``.
        sizes: usable blocks of each replica; the recorded replicas by default.
        bounds: of the rules that go by what is cached.
        sticky_by: what the rule ``sticky`` goes by.
        step_sec: what each token of an answer takes; as recorded by default, and
            ``clock.DEFAULT_SEC`` where that is not known.
        progress: called with the name of each rule before its replay.

    Raises:
        SessionError: contents are not known, the size of a pool is not known, there is only one
            replica, or nothing to stick by.

    """
    workload, label = recorded.workload, recorded.label
    fast.check(workload)
    own = recorded.num_blocks
    chosen = tuple(sizes) if sizes is not None else _known(recorded)
    if len(chosen) < 2:
        raise SessionError(
            f"{workload.name} has one replica, and nothing to route; give the sessions of all "
            "replicas, or --replicas"
        )
    # Turns that stick need all requests, also those that were never admitted.
    keys = _keys(workload, label, sticky_by)
    ran = np.flatnonzero(workload.computed_tokens > 0)
    admitted = workload.take(ran)
    if not len(ran):
        raise SessionError(f"{workload.name} has no request that was admitted; nothing to route")
    end_sec, step = _ends(admitted, step_sec)
    requests = asked(admitted, end_sec, keys[ran])
    counted = _Counted(requests, admitted)
    limits = bounds or Bounds()
    is_recorded = recorded.is_measured and len(chosen) == len(own)
    measured = model = None
    if is_recorded:
        measured = counted.measured(len(chosen))
        progress("as recorded")
        model = counted.of(
            "as recorded", replay(requests, chosen, as_recorded(admitted.engine.tolist())), chosen
        )
    found = []
    for policy in policies:
        progress(policy)
        result = replay(requests, chosen, RULES[policy](limits))
        found.append(counted.of(policy, result, chosen))
    progress("one cache")
    one = (sum(chosen),)
    return Routing(
        name=workload.name,
        replicas=recorded.names if is_recorded else tuple(map(str, range(len(chosen)))),
        num_blocks=chosen,
        block_size=workload.block_size,
        warm_up=int((~workload.counts).sum()),
        never_admitted=len(workload) - len(ran),
        step_sec=step,
        sticky_by=sticky_by,
        keys=len(np.unique(keys)),
        bounds=limits,
        measured=measured,
        as_recorded=model,
        policies=tuple(found),
        one_cache=counted.of("one cache", replay(requests, one, lambda *_: 0), one),
        notes=tuple(_notes(recorded)),
    )


def _known(recorded: Recorded) -> tuple[int, ...]:
    for name, size in zip(recorded.names, recorded.num_blocks, strict=True):
        if size is None:
            raise SessionError(f"{name} does not say how large its pool is; give --blocks")
    return tuple(size for size in recorded.num_blocks if size is not None)


def _keys(workload: Workload, label: Ints, by: StickyBy) -> Ints:
    """What each request sticks by; a request without it has a key of its own."""
    own = np.arange(len(workload))
    if by == "conversation":
        return _conversations(workload)
    named = workload.tenant if by == "salt" else label
    if (named == NO_LABEL).all():
        has = "cache_salt" if by == "salt" else "label"
        raise SessionError(f"no request of {workload.name} has a {has} to stick by")
    # Whoever has a name sticks to the first request with it.
    _, first, number = np.unique(named, return_index=True, return_inverse=True)
    return np.where(named == NO_LABEL, own, first[number.ravel()])


def _conversations(workload: Workload) -> Ints:
    """For each request, the first one of its conversation, wherever its turns were served."""
    before = workload.waits_for
    if not (before >= 0).any():
        chains = workload.chains()
        known = references.of_chains(
            chains,
            readable=chains.lengths,
            needs=chains.lengths,
            freed=np.arange(len(workload)),
            counts=workload.counts,
            block_size=workload.block_size,
            input_tokens=workload.input_tokens,
        )
        before = ceiling.turns_before(known, references.first_user(known))
    return Turns(before, np.zeros(len(workload))).first


def _ends(workload: Workload, step_sec: float | None) -> tuple[Floats, float | None]:
    """When each request ends, and the time of a token of its answer, where that decides."""
    admitted = np.where(
        np.isfinite(workload.admitted_sec), workload.admitted_sec, workload.arrival_sec
    )
    is_known = np.isfinite(workload.finish_sec)
    if step_sec is None and is_known.any():
        guessed = admitted + workload.output_tokens * DEFAULT_SEC
        return np.where(is_known, workload.finish_sec, guessed), None
    step = DEFAULT_SEC if step_sec is None else step_sec
    return admitted + workload.output_tokens * step, step


@dataclass(frozen=True)
class _Counted:
    """The requests that are replayed, to count what came of them."""

    requests: Asked
    workload: Workload

    def of(self, policy: str, result: Replayed, sizes: Sequence[int]) -> Routed:
        """What came of a replay."""
        own = self.workload
        block = own.block_size
        return Routed(
            policy=policy,
            says=SAYS["fast"],
            requests=int(own.counts.sum()),
            query_tokens=int(own.input_tokens[own.counts].sum()),
            hit_tokens=int(result.found[own.counts].sum()) * block,
            elsewhere_tokens=int(result.elsewhere[own.counts].sum()) * block,
            evictions=result.evictions,
            replicas=self._shares(result.replica, result.found * block, len(sizes)),
        )

    def measured(self, replicas: int) -> Routed:
        """What the session has of itself."""
        own = self.workload
        return Routed(
            policy="as it ran",
            says=SAYS["measured"],
            requests=int(own.counts.sum()),
            query_tokens=int(own.input_tokens[own.counts].sum()),
            hit_tokens=int(own.hit_tokens[own.counts].sum()),
            elsewhere_tokens=None,
            evictions=None,
            replicas=self._shares(own.engine, own.hit_tokens, replicas),
        )

    def _shares(self, replica: Ints, found_tokens: Ints, replicas: int) -> tuple[Share, ...]:
        own = self.workload
        computed = own.input_tokens - found_tokens + own.output_tokens
        return tuple(
            self._share(own.counts & (replica == number), computed) for number in range(replicas)
        )

    def _share(self, chosen: Bools, computed: Ints) -> Share:
        counts = self.workload.counts
        begin, end = self.requests.arrival_sec, self.requests.end_sec
        span = float(end[counts].max() - begin[counts].min())
        busy = float((end - begin)[chosen].sum())
        return Share(
            requests=int(chosen.sum()),
            computed_tokens=int(computed[chosen].sum()),
            running=busy / span if span else 0.0,
            peak=_peak(begin[chosen], end[chosen]),
        )


def _peak(begin: Floats, end: Floats) -> int:
    """The most that were there at once. One that ends as another begins makes room for it."""
    at_sec = np.concatenate([begin, end])
    change = np.repeat([1, -1], len(begin))
    order = np.lexsort((change, at_sec))
    return int(np.cumsum(change[order]).max(initial=0))


def _over(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _largest(shares: Sequence[float]) -> float | None:
    mean = sum(shares) / len(shares)
    return max(shares) / mean if mean else None


def _notes(recorded: Recorded) -> list[str]:
    workload = recorded.workload
    notes = list(recorded.notes)
    evicted = int((~workload.drops.is_reset).sum())
    if evicted:
        notes.append(f"{evicted:,} evictions on request are left out")
    return [f"{note[0].upper()}{note[1:].rstrip('.')}." for note in notes]
