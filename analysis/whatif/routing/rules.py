# SPDX-License-Identifier: Apache-2.0
"""To which replica does a router send the next request?

A rule sees how many requests each replica was sent that have not ended (its *load*), and of the
request its prompt and the key that it sticks by. Each is deterministic: of replicas that are equal
otherwise, the one goes first that was sent something longest ago.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from analysis.whatif.routing.cache import Cache


@dataclass(frozen=True)
class Bounds:
    """When a router goes by what is cached, and when by load. The names and the values are those
    of SGLang's router.

    ``cache_threshold``: the match has to be more than this share of the prompt, from 0 to 1.
    ``balance_abs_threshold`` and ``balance_rel_threshold``: the load alone decides while the
    largest load is more than so many requests above the smallest, and more than so many times it.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5


@dataclass(frozen=True)
class Request:
    """``prompt``: its full blocks. ``readable``: how many of them a lookup can find.
    ``share_of_block``: a block's share of the prompt's tokens. ``key``: what it sticks by."""

    prompt: Sequence[int]
    readable: int
    share_of_block: float
    key: int


@dataclass
class Replicas:
    """What is known of each replica: its cache, its load, and when it was last sent something, as a
    number that grows."""

    caches: Sequence[Cache]
    load: list[int] = field(default_factory=list)
    last_sent: list[int] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self.load = [0] * len(self.caches)
        self.last_sent = list(range(-len(self.caches), 0))

    def send(self, replica: int) -> None:
        """A request goes to this one."""
        self.load[replica] += 1
        self.last_sent[replica] = self.sent
        self.sent += 1

    def least_loaded(self, among: Sequence[int] | None = None) -> int:
        """The one with the least load, of all or of some."""
        every = range(len(self.caches)) if among is None else among
        return min(every, key=lambda one: (self.load[one], self.last_sent[one]))

    def are_apart(self, bounds: Bounds) -> bool:
        """Whether their loads differ so much that nothing else counts."""
        most, least = max(self.load), min(self.load)
        apart = most - least > bounds.balance_abs_threshold
        return apart and most > bounds.balance_rel_threshold * least


Rule = Callable[[Request, Replicas], int]
"""Gives the number of the replica that the request is sent to."""


def _round_robin(_bounds: Bounds) -> Rule:
    return lambda _request, replicas: replicas.sent % len(replicas.caches)


def _least_loaded(_bounds: Bounds) -> Rule:
    return lambda _request, replicas: replicas.least_loaded()


def _sticky(_bounds: Bounds) -> Rule:
    """The first request of a key goes to the least load, and all others of it to the same place."""
    places: dict[int, int] = {}

    def choose(request: Request, replicas: Replicas) -> int:
        if request.key not in places:
            places[request.key] = replicas.least_loaded()
        return places[request.key]

    return choose


def _prefix_aware(bounds: Bounds) -> Rule:
    """By the prompts that each replica was sent, none of which is ever forgotten."""
    known: list[set[int]] = []

    def choose(request: Request, replicas: Replicas) -> int:
        while len(known) < len(replicas.caches):
            known.append(set())
        matches = [_match(request.prompt, blocks) for blocks in known]
        chosen = _by_match(matches, request, replicas, bounds)
        known[chosen].update(request.prompt)
        return chosen

    return choose


def _cache_aware(bounds: Bounds) -> Rule:
    """By what each replica has in its cache at that moment, as its KV events tell."""

    def choose(request: Request, replicas: Replicas) -> int:
        readable = request.prompt[: request.readable]
        matches = [cache.depth(readable) for cache in replicas.caches]
        return _by_match(matches, request, replicas, bounds)

    return choose


def _match(prompt: Sequence[int], known: set[int]) -> int:
    for at, block in enumerate(prompt):
        if block not in known:
            return at
    return len(prompt)


def _by_match(matches: Sequence[int], request: Request, replicas: Replicas, bounds: Bounds) -> int:
    most = max(matches)
    if replicas.are_apart(bounds) or most * request.share_of_block <= bounds.cache_threshold:
        return replicas.least_loaded()
    return replicas.least_loaded([one for one, match in enumerate(matches) if match == most])


RULES: Mapping[str, Callable[[Bounds], Rule]] = {
    "round-robin": _round_robin,
    "least-loaded": _least_loaded,
    "sticky": _sticky,
    "prefix-aware": _prefix_aware,
    "cache-aware": _cache_aware,
}
"""Every policy by its name. What it makes remembers where it sent things, and is for one replay."""


def as_recorded(places: Sequence[int]) -> Rule:
    """Sends the requests, in the order in which they come, where they went."""
    return lambda _request, replicas: places[replicas.sent]
