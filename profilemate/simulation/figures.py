# SPDX-License-Identifier: Apache-2.0
"""What did the simulated engines do, all of them together?"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from analysis.whatif.configuration import Configuration
from analysis.whatif.outcome import Outcome


@dataclass
class Figures:
    """An engine's counts after the warm-up; the names are those of ``Outcome``.

    ``waits``: the seconds from each request's arrival to its first admission.
    ``begin_sec`` and ``end_sec``: the first arrival and the last end.
    """

    requests: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    failed_requests: int = 0
    waits: list[float] = field(default_factory=list)
    begin_sec: float = np.inf
    end_sec: float = -np.inf

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            requests=self.requests + other.requests,
            query_tokens=self.query_tokens + other.query_tokens,
            hit_tokens=self.hit_tokens + other.hit_tokens,
            evictions=self.evictions + other.evictions,
            preemptions=self.preemptions + other.preemptions,
            recomputed_tokens=self.recomputed_tokens + other.recomputed_tokens,
            steps=self.steps + other.steps,
            failed_requests=self.failed_requests + other.failed_requests,
            waits=self.waits + other.waits,
            begin_sec=min(self.begin_sec, other.begin_sec),
            end_sec=max(self.end_sec, other.end_sec),
        )

    def outcome(self, configuration: Configuration) -> Outcome:
        """The figures as the outcome of this configuration."""
        return Outcome(
            engine="exact",
            label=configuration.label,
            num_blocks=configuration.num_blocks,
            block_size=configuration.block_size,
            policy="lru",
            requests=self.requests,
            query_tokens=self.query_tokens,
            hit_tokens=self.hit_tokens,
            evictions=self.evictions,
            failed_requests=self.failed_requests,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            steps=self.steps,
            queue_mean_sec=float(np.mean(self.waits)) if self.waits else None,
            queue_p99_sec=float(np.percentile(self.waits, 99)) if self.waits else None,
            span_sec=self.end_sec - self.begin_sec if self.end_sec > self.begin_sec else None,
        )
