# SPDX-License-Identifier: Apache-2.0
"""What did one configuration do with a workload, or what would it have done?

Measured figures, those simulated through vLLM's own code, and modelled ones have the same shape,
so that they can stand in one table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from analysis.whatif.host_memory import HostOutcome

Engine = Literal["measured", "exact", "fast"]

SAYS = {"measured": "measured", "exact": "replayed", "fast": "modelled"}
"""The word for each engine's figures in JSON, where programs read it. Text says it in the words of
``analysis.wording.whatif``."""


@dataclass(frozen=True)
class Served:
    """``requests``, ``query_tokens``, ``hit_tokens`` and ``hit_rate`` as those of ``Outcome``, of
    all requests that one configuration served."""

    requests: int
    query_tokens: int
    hit_tokens: int

    hit_rate: float | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hit_rate", _rate(self.hit_tokens, self.query_tokens))


@dataclass(frozen=True)
class Outcome:
    """What one configuration did.

    ``engine``: ``measured`` (the session itself), ``exact`` (simulated through vLLM's scheduler) or
    ``fast`` (modelled). ``label``: the configuration, in a few words. ``num_blocks``: usable blocks
    of each engine's pool, without the null block; None for a pool without a limit. ``block_size``:
    tokens in a block. ``policy``: the rule of eviction.

    ``requests``: admitted requests that count, each once; of several simulated configurations,
    those that each of them served. ``query_tokens``: tokens of their prompts; ``hit_tokens``: those
    found in the cache. ``evictions``: cached blocks whose room was needed. ``failed_requests``:
    requests that need more blocks than the pool has.

    These are None where the engine does not know them. ``preemptions``; ``recomputed_tokens``:
    computed again because of these; ``steps``: those that scheduled tokens; ``queue_mean_sec`` and
    ``queue_p99_sec``: from a request's arrival to its first admission; ``span_sec``: from the
    first arrival to the last end; ``served``: the lookups of all requests that this configuration
    served, whatever others did; ``host``: what host memory did, None without any. ``hit_tokens``
    are those of the pool alone.

    These follow from the others. ``says``: ``measured``, ``replayed`` or ``modelled``;
    ``hit_rate``: tokens found, of tokens asked for, from 0 to 1, None where none were asked for.
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
    served: Served | None = None
    host: HostOutcome | None = None

    says: str = field(init=False)
    hit_rate: float | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", SAYS[self.engine])
        object.__setattr__(self, "hit_rate", _rate(self.hit_tokens, self.query_tokens))


def _rate(hit_tokens: int, query_tokens: int) -> float | None:
    return hit_tokens / query_tokens if query_tokens else None
