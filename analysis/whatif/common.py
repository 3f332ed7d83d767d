# SPDX-License-Identifier: Apache-2.0
"""On which requests can several configurations be compared?

A small pool can never hold some requests, and those are often the ones that would find most. So two
hit rates say something about two configurations only if they are of the same requests: of those
that both of them served.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.whatif.outcome import Outcome, Served
from analysis.whatif.workload import Workload


@dataclass
class Lookups:
    """What one configuration did with each request that counts.

    ``found``: by the number of each admitted request, the tokens of its prompt that were looked up,
    and those that were found. ``failed``: the numbers of requests that can never run. ``host``: by
    the number, the tokens that were found in host memory and not in the pool.
    """

    found: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    host: dict[int, int] = field(default_factory=dict)

    def __add__(self, other: Lookups) -> Lookups:
        return Lookups(self.found | other.found, self.failed | other.failed, self.host | other.host)

    def served(self, without: Collection[int] = ()) -> Served:
        """The sums over all served requests but some."""
        left = [
            pair
            for number, pair in self.found.items()
            if number not in self.failed and number not in without
        ]
        return Served(len(left), sum(query for query, _ in left), sum(hit for _, hit in left))

    def host_tokens(self, without: Collection[int] = ()) -> int:
        """Tokens that all served requests but some found in host memory."""
        return sum(
            tokens
            for number, tokens in self.host.items()
            if number not in self.failed and number not in without
        )


def left_out(configurations: Sequence[Lookups]) -> frozenset[int]:
    """The requests that one of the configurations served and another one did not.

    A configuration that served none leaves nothing to compare, and has no say.
    """
    sets = [frozenset(one.found) - one.failed for one in configurations]
    serving = [one for one in sets if one]
    if not serving:
        return frozenset()
    return frozenset.union(*serving) - frozenset.intersection(*serving)


def of_measured(
    outcome: Outcome, workload: Workload, begin_sec: float, without: Collection[int]
) -> Outcome:
    """What a session did with the requests that are compared: with all but some.

    Args:
        outcome: what it did with all of them.
        workload: its requests, with the numbers that ``without`` has.
        begin_sec: the end of its warm-up.
        without: the numbers of the requests that are left out.

    """
    numbers = np.fromiter(sorted(without), np.int64, len(without))
    # It counts a request when it admits it. What never was admitted it has not counted.
    numbers = numbers[workload.admitted_sec[numbers] >= begin_sec]
    query = outcome.query_tokens - int(workload.input_tokens[numbers].sum())
    host = outcome.host
    if host is not None:
        hits = host.hit_tokens - int(workload.external_tokens[numbers].sum())
        host = replace(host, hit_tokens=hits, hit_rate=hits / query if query else None)
    return replace(
        outcome,
        host=host,
        requests=outcome.requests - len(numbers),
        query_tokens=query,
        hit_tokens=outcome.hit_tokens - int(workload.hit_tokens[numbers].sum()),
        served=Served(outcome.requests, outcome.query_tokens, outcome.hit_tokens),
    )
