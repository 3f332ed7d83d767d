# SPDX-License-Identifier: Apache-2.0
"""What did one configuration do with a workload, or what would it have done?

One shape for what was measured, what was replayed through vLLM's own code and what was modelled,
so that they can stand in one table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Engine = Literal["measured", "exact", "fast"]

SAYS = {"measured": "measured", "exact": "replayed", "fast": "modelled"}
"""The word for figures of each engine, wherever a user sees them."""


@dataclass(frozen=True)
class Outcome:
    """What one configuration did.

    ``engine``: ``measured`` (the session itself), ``exact`` (replayed through vLLM's scheduler) or
    ``fast`` (modelled). ``label``: the configuration, in a few words. ``num_blocks``: the pool's
    usable blocks on each engine, without the null block; None for a pool without an end.
    ``block_size``: tokens a block. ``policy``: what is evicted first.

    ``requests``: requests that were admitted and count, each once. ``query_tokens``: their prompt
    tokens; ``hit_tokens``: those of them that were found in the cache. ``evictions``: blocks with
    content that lost it. ``failed_requests``: requests that need more blocks than the pool has.

    None where the engine does not tell: ``preemptions``; ``recomputed_tokens``, computed again
    because of them; ``steps`` of the scheduler that scheduled tokens; ``queue_mean_sec`` and
    ``queue_p99_sec``, from a request's arrival to its first admission; ``span_sec``, from the
    first arrival to the last end.

    Follow from these: ``says``, that figures are ``measured``, ``replayed`` or ``modelled``, and
    ``hit_rate``, tokens found of those asked for, from 0 to 1, None where none were.
    """

    engine: Engine
    label: str
    num_blocks: int | None
    block_size: int
    policy: str
    requests: int
    query_tokens: int
    hit_tokens: int
    evictions: int | None
    failed_requests: int = 0
    preemptions: int | None = None
    recomputed_tokens: int | None = None
    steps: int | None = None
    queue_mean_sec: float | None = None
    queue_p99_sec: float | None = None
    span_sec: float | None = None

    says: str = field(init=False)
    hit_rate: float | None = field(init=False)

    def __post_init__(self) -> None:
        rate = self.hit_tokens / self.query_tokens if self.query_tokens else None
        object.__setattr__(self, "says", SAYS[self.engine])
        object.__setattr__(self, "hit_rate", rate)
