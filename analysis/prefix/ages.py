# SPDX-License-Identifier: Apache-2.0
"""Is the cache large enough: do contents come back sooner than they are evicted?

The age of a content is the time since its last use: at a hit since the request before was
admitted that used it, at an eviction what vLLM calls idle before evict. Where most contents come
back younger than others are evicted, there is room for what is asked for. The time to the last
use is that to an admission, so a block that the request before filled later, in a later chunk of
its prompt or in its answer, was in truth a little younger at its hit.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.pool.lifetimes import Lifetimes
from analysis.prefix.reuse import reuse_gaps
from analysis.stats.spread import Spread, spread


@dataclass(frozen=True)
class Ages:
    """``at_hit`` of every block that was found, ``at_eviction`` of every block that was evicted;
    their bins have the same bounds.

    ``reuses``: blocks asked for that had been used before, found or not. ``later``: those that
    came back after more time than the median age at eviction; ``later_share`` from 0 to 1. Both
    are None where nothing was evicted.
    """

    at_hit: Spread
    at_eviction: Spread
    reuses: int
    later: int | None
    later_share: float | None


def measure(uses: pl.DataFrame, lifetimes: Lifetimes) -> Ages:
    """The ages, from what ``reuse.shared`` found and the idle times of evicted blocks."""
    ages = reuse_gaps(uses)
    median = lifetimes.idle.p50_sec
    later = None if median is None else int((ages["gap"] > median).sum())
    return Ages(
        at_hit=spread(ages.filter("found")["gap"]),
        at_eviction=lifetimes.idle,
        reuses=ages.height,
        later=later,
        later_share=later / ages.height if later is not None and ages.height else None,
    )
