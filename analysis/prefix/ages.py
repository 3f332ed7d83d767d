# SPDX-License-Identifier: Apache-2.0
"""Is the cache large enough: do contents come back sooner than they are evicted?

The age of a content is the time since its last use. At a hit it counts from the admission of the
request that used the content before; at an eviction it is the idle time (vLLM's "idle before
evict"). The cache has room for what is asked for if most contents come back younger than others
are evicted. A request may fill a block long after its admission, in a later chunk of its prompt or
in its answer: such a block was a little younger at its next hit than its age here.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.pool.lifetimes import Lifetimes
from analysis.prefix.request_ages import Clocks, EvictionAgeTally, RequestAges, at_hit
from analysis.prefix.reuse import reuse_gaps
from analysis.stats.spread import Spread, spread


@dataclass(frozen=True)
class Ages:
    """``at_hit_requests`` and ``at_eviction_requests``: ages in requests, of the same blocks.

    Ages in seconds: ``at_hit`` of every block that a lookup found, ``at_eviction`` of every
    block evicted because its room was needed. Their bins have the same bounds.

    ``reuses``: blocks that a request asked for and an earlier one had used, found or not.
    ``later``: those of them that were older than the median age at eviction; ``later_share``: as a
    share, from 0 to 1. Both are None where nothing was evicted for
    room.
    """

    at_hit: Spread
    at_eviction: Spread
    reuses: int
    later: int | None
    later_share: float | None
    at_hit_requests: RequestAges
    at_eviction_requests: RequestAges


def measure(
    uses: pl.DataFrame, lifetimes: Lifetimes, admitted: Clocks, evicted: EvictionAgeTally
) -> Ages:
    """The ages.

    Args:
        uses: what ``analysis.prefix.reuse.uses`` returns.
        lifetimes: with the idle times of evicted blocks.
        admitted: what ``analysis.prefix.request_ages.clocks`` returns.
        evicted: a tally that has seen all evictions.

    """
    ages = reuse_gaps(uses)
    median = lifetimes.idle.p50_sec
    later = None if median is None else int((ages["gap"] > median).sum())
    return Ages(
        at_hit=spread(ages.filter("found")["gap"]),
        at_eviction=lifetimes.idle,
        reuses=ages.height,
        later=later,
        later_share=later / ages.height if later is not None and ages.height else None,
        at_hit_requests=at_hit(uses, admitted),
        at_eviction_requests=evicted.result(),
    )
