# SPDX-License-Identifier: Apache-2.0
"""What did the fast engine find: hit rates by size and rule, and what holds them back?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.whatif.outcome import Outcome
from analysis.whatif.pools import Pool

LRU = "lru"
"""What vLLM does."""

BELADY = "belady"
"""The bound that no rule exceeds."""

Holds = Literal["capacity", "policy", "workload"]


@dataclass(frozen=True)
class Ceiling:
    """Over all engines. ``query_tokens``: prompt tokens. Of these, ``within_tokens`` and
    ``across_tokens`` were computed before; ``new_tokens`` were not, or not in a full block, or are
    in the block that is always computed. ``hit_rate``: the share of the first two, from 0 to 1,
    None where there is no request. ``conversations``: how many, single requests included.
    ``distinct_blocks``: different contents, of prompts and outputs.
    """

    requests: int
    query_tokens: int
    within_tokens: int
    across_tokens: int
    new_tokens: int
    hit_rate: float | None
    conversations: int
    distinct_blocks: int


@dataclass(frozen=True)
class Verdict:
    """What holds the hit rate of a pool back.

    ``by``: ``capacity`` (even the best choice of what to evict would lose most of what is lost),
    ``policy`` (a better choice would keep most of it) or ``workload`` (nothing is lost: what is not
    found has not been there before). ``lost_to_capacity`` and ``lost_to_policy``: shares of the
    prompt tokens, from 0 to 1: the ceiling less Belady's bound, and that less vLLM's rule. Belady's
    bound knows the future; ``best_policy`` is the rule that does not and finds most, of those asked
    for, and ``best_hit_rate`` what it finds.
    """

    by: Holds
    lost_to_capacity: float
    lost_to_policy: float
    best_policy: str
    best_hit_rate: float


@dataclass(frozen=True)
class Point:
    """One pool: ``outcomes`` by rule, in the order they were asked for. ``verdict``: None unless
    vLLM's rule and the bound were."""

    pool: Pool
    outcomes: tuple[Outcome, ...]
    verdict: Verdict | None

    def outcome(self, policy: str) -> Outcome | None:
        """What this rule does with the pool."""
        return next((found for found in self.outcomes if found.policy == policy), None)


@dataclass(frozen=True)
class Curve:
    """The model's answer for a workload.

    ``name``: the session or trace. ``block_size``: tokens a block. ``engines``: data-parallel
    ranks, each with a pool of its own, of the size given. ``references``: blocks that requests
    held, each time counted. ``measured``: what the session itself did, None for a trace.
    ``points``: by size. ``at_measured``: the model at the session's own size, to be held against
    ``measured``; its ``verdict`` is the session's. ``enough_blocks``: the smallest pool, under
    vLLM's rule, that finds all that there is to be found: nothing more is to be gained beyond it.
    ``nearly_blocks``: the smallest that finds 99 % of it. ``notes``: what the model leaves out
    here, one sentence each.
    """

    name: str
    block_size: int
    engines: int
    references: int
    measured: Outcome | None
    ceiling: Ceiling
    points: tuple[Point, ...]
    at_measured: Point | None
    enough_blocks: int
    nearly_blocks: int
    notes: tuple[str, ...]
