# SPDX-License-Identifier: Apache-2.0
"""What did the fast engine find: hit rates by size and rule, and the limits of them?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.whatif.outcome import Outcome
from analysis.whatif.pools import Pool

LRU = "lru"
"""vLLM's rule."""

BELADY = "belady"
"""The bound for all rules."""

Holds = Literal["capacity", "policy", "resets", "workload"]


@dataclass(frozen=True)
class Ceiling:
    """What a pool that never evicts for room would find, over all engines, with the same resets and
    evictions on request.

    ``query_tokens``: prompt tokens. An earlier request had computed ``within_tokens`` of them in
    the same conversation and ``across_tokens`` in another one. ``new_tokens`` are the others: no
    request had computed them, or they lie in a block that is not full, or in the one that vLLM
    always computes. ``hit_rate``: the share of the first two, from 0 to 1, None without a request.
    ``conversations``: how many there are, single requests included. ``distinct_blocks``: different
    contents, of prompts and answers. ``dropped_tokens``: of the new ones, those that such a pool
    would have found without resets and evictions on request.
    """

    requests: int
    query_tokens: int
    within_tokens: int
    across_tokens: int
    new_tokens: int
    hit_rate: float | None
    conversations: int
    distinct_blocks: int
    dropped_tokens: int = 0


@dataclass(frozen=True)
class Verdict:
    """What limits the hit rate of a pool.

    ``by``: ``capacity`` (the best choice of blocks to evict would still lose most of what is
    lost), ``policy`` (a better choice would keep most of it), ``resets`` (more is lost to resets
    and evictions on request than to both of these) or ``workload`` (nothing is lost: all else is
    new). ``lost_to_capacity`` and ``lost_to_policy``: shares of the prompt tokens, from 0
    to 1: the ceiling less Belady's bound, and that bound less vLLM's rule. Belady's bound knows the
    future. ``best_policy``: of the other rules that were asked for, the one that finds most;
    ``best_hit_rate``: what it finds.
    """

    by: Holds
    lost_to_capacity: float
    lost_to_policy: float
    best_policy: str
    best_hit_rate: float


@dataclass(frozen=True)
class Point:
    """One pool. ``outcomes``: by rule, in the order of the rules. ``verdict``: None unless vLLM's
    rule and Belady's are among them."""

    pool: Pool
    outcomes: tuple[Outcome, ...]
    verdict: Verdict | None

    def outcome(self, policy: str) -> Outcome | None:
        """The outcome of this rule; None where it was not asked for."""
        return next((found for found in self.outcomes if found.policy == policy), None)


@dataclass(frozen=True)
class Curve:
    """The model's answer for a workload.

    ``name``: the session or trace. ``block_size``: tokens in a block. ``engines``: data-parallel
    ranks, each with a pool of its own of the given size. ``warm_up``: requests that are modelled
    and not counted. ``references``: the sum of the blocks of all requests, these
    included. ``measured``: what the session itself did, None for a trace. ``points``: by size.
    ``at_measured``: the model at the session's own size, to compare with ``measured``; its
    ``verdict`` is that of the session. ``enough_blocks``: the smallest pool that finds, under
    vLLM's rule, all that a pool can find. ``nearly_blocks``: the smallest that finds 99 % of it.
    ``notes``: what the model leaves out here, one sentence each.
    """

    name: str
    block_size: int
    engines: int
    warm_up: int
    references: int
    measured: Outcome | None
    ceiling: Ceiling
    points: tuple[Point, ...]
    at_measured: Point | None
    enough_blocks: int
    nearly_blocks: int
    notes: tuple[str, ...]
