# SPDX-License-Identifier: Apache-2.0
"""What does each request find on the replica that a rule sends it to?

A request is sent when it arrives, looks for its prompt's blocks when it is admitted, and holds all
of its blocks until it ends. These times are the recorded ones whatever the rule: a replica that is
sent more does not get slower, and a hit does not make a request shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.whatif import references
from analysis.whatif.ids import Ids, Ints
from analysis.whatif.routing.cache import Cache
from analysis.whatif.routing.rules import Replicas, Request, Rule
from analysis.whatif.workload import Floats, Workload

_END, _RESET, _ARRIVAL, _ADMISSION, _OWN_END = range(5)
"""What comes first of what happens at the same time. A request that takes no time ends last."""


@dataclass(frozen=True)
class Asked:
    """Requests in the order in which they arrive, with an entry for each in every array.

    ``chains``: numbers of their blocks, each of which stands for a content with everything before
    it. ``prompt_blocks``: of these, full blocks of the prompt; ``readable``: those that a lookup
    can find. ``arrival_sec``, ``admitted_sec`` and ``end_sec``: in this order. ``input_tokens``: of
    the prompt. ``keys``: numbers that requests stick by. ``resets``: when the cache of which
    recorded replica was emptied.
    """

    chains: Ids
    prompt_blocks: Ints
    readable: Ints
    arrival_sec: Floats
    admitted_sec: Floats
    end_sec: Floats
    input_tokens: Ints
    block_size: int
    keys: Ints
    resets: tuple[tuple[float, int], ...] = ()

    def __len__(self) -> int:
        return len(self.readable)


def asked(workload: Workload, end_sec: Floats, keys: Ints) -> Asked:
    """The requests of a workload, all of which were admitted, in its order."""
    chains = workload.chains()
    known = references.of_chains(
        chains,
        readable=np.maximum(workload.input_tokens - 1, 0) // workload.block_size,
        needs=chains.lengths,
        freed=np.arange(len(workload)),
        counts=workload.counts,
        block_size=workload.block_size,
        input_tokens=workload.input_tokens,
    )
    admitted = np.where(
        np.isfinite(workload.admitted_sec), workload.admitted_sec, workload.arrival_sec
    )
    admitted = np.maximum(admitted, workload.arrival_sec)
    dropped = workload.drops.take(workload.drops.is_reset)
    return Asked(
        chains=known.chains,
        prompt_blocks=np.minimum(workload.input_tokens // workload.block_size, chains.lengths),
        readable=known.readable,
        arrival_sec=workload.arrival_sec,
        admitted_sec=admitted,
        end_sec=np.maximum(end_sec, admitted),
        input_tokens=workload.input_tokens,
        block_size=workload.block_size,
        keys=keys,
        resets=tuple(zip(dropped.at_sec.tolist(), dropped.engine.tolist(), strict=True)),
    )


@dataclass(frozen=True)
class Replayed:
    """An entry for each request. ``replica``: where it was sent. ``found``: blocks that it found
    there. ``elsewhere``: blocks more that another replica would have found at that moment.
    ``evictions``: blocks that were evicted for room, on all replicas together."""

    replica: Ints
    found: Ints
    elsewhere: Ints
    evictions: int


def replay(requests: Asked, sizes: Sequence[int], rule: Rule) -> Replayed:
    """Send the requests to replicas with so many usable blocks.

    A recorded reset empties the cache of the replica that has this number, if there is one.
    """
    run = _Run(requests, sizes)
    for kind, number in _events(requests):
        if kind == _ARRIVAL:
            run.send(number, rule)
        elif kind == _ADMISSION:
            run.admit(number)
        elif kind == _RESET:
            run.reset(requests.resets[number][1])
        else:
            run.end(number)
    return Replayed(
        replica=np.array(run.replica, np.int64),
        found=np.array(run.found, np.int64),
        elsewhere=np.array(run.elsewhere, np.int64),
        evictions=sum(cache.evictions for cache in run.caches),
    )


def _events(requests: Asked) -> list[tuple[int, int]]:
    """What happens in order of time: its kind, and the number of the request or the reset."""
    count, resets = len(requests), requests.resets
    at_sec = np.concatenate(
        [
            requests.arrival_sec,
            requests.admitted_sec,
            requests.end_sec,
            [at for at, _ in resets],
        ]
    )
    ends = np.where(requests.end_sec > requests.admitted_sec, _END, _OWN_END)
    kind = np.concatenate(
        [np.repeat(_ARRIVAL, count), np.repeat(_ADMISSION, count), ends, [_RESET] * len(resets)]
    ).astype(np.int64)
    number = np.concatenate([np.tile(np.arange(count), 3), np.arange(len(resets))])
    order = np.lexsort((number, kind, at_sec))
    return list(zip(kind[order].tolist(), number[order].tolist(), strict=True))


class _Run:
    """One replay. After a reset a replica has another cache; what runs lets go of the old one."""

    def __init__(self, requests: Asked, sizes: Sequence[int]) -> None:
        count = len(requests)
        self.caches = [Cache(size) for size in sizes]
        self.replica = [-1] * count
        self.found = [0] * count
        self.elsewhere = [0] * count
        self._requests = requests
        self._sizes = sizes
        self._replicas = Replicas(self.caches)
        self._held_in: dict[int, Cache] = {}

    def send(self, number: int, rule: Rule) -> None:
        of = self._requests
        request = Request(
            prompt=of.chains[number][: of.prompt_blocks[number]].tolist(),
            readable=int(of.readable[number]),
            share_of_block=of.block_size / max(1, int(of.input_tokens[number])),
            key=int(of.keys[number]),
        )
        chosen = rule(request, self._replicas)
        self._replicas.send(chosen)
        self.replica[number] = chosen

    def admit(self, number: int) -> None:
        chain = self._requests.chains[number].tolist()
        readable = chain[: int(self._requests.readable[number])]
        depths = [cache.depth(readable) for cache in self.caches]
        own = self.replica[number]
        self.found[number] = depths[own]
        self.elsewhere[number] = max(depths) - depths[own]
        self.caches[own].hold(chain)
        self._held_in[number] = self.caches[own]

    def end(self, number: int) -> None:
        self._held_in.pop(number).release(self._requests.chains[number].tolist())
        self._replicas.load[self.replica[number]] -= 1

    def reset(self, replica: int) -> None:
        if replica < len(self.caches):
            fresh = Cache(self._sizes[replica])
            fresh.evictions = self.caches[replica].evictions
            self.caches[replica] = fresh
