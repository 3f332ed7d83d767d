# SPDX-License-Identifier: Apache-2.0
"""What did the simulated engines do, all of them together?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from analysis.whatif.common import Lookups
from analysis.whatif.configuration import Configuration
from analysis.whatif.outcome import Outcome


@dataclass
class Figures:
    """An engine's counts after the warm-up; the names are those of ``Outcome``.

    ``lookups``: by the requests' numbers among those of all engines.
    ``waits``: the seconds from each request's arrival to its first admission.
    ``begin_sec`` and ``end_sec``: the first arrival and the last end.
    """

    lookups: Lookups = field(default_factory=Lookups)
    evictions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    waits: list[float] = field(default_factory=list)
    begin_sec: float = np.inf
    end_sec: float = -np.inf

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            lookups=Lookups(
                self.lookups.found | other.lookups.found,
                self.lookups.failed | other.lookups.failed,
            ),
            evictions=self.evictions + other.evictions,
            preemptions=self.preemptions + other.preemptions,
            recomputed_tokens=self.recomputed_tokens + other.recomputed_tokens,
            steps=self.steps + other.steps,
            waits=self.waits + other.waits,
            begin_sec=min(self.begin_sec, other.begin_sec),
            end_sec=max(self.end_sec, other.end_sec),
        )

    def outcome(self, configuration: Configuration, without: Collection[int] = ()) -> Outcome:
        """The figures as the outcome of this configuration.

        Args:
            configuration: what was simulated.
            without: the numbers of requests that another configuration could not serve.

        """
        compared = self.lookups.served(without)
        return Outcome(
            engine="exact",
            label=configuration.label,
            num_blocks=configuration.num_blocks,
            block_size=configuration.block_size,
            policy="lru",
            requests=compared.requests,
            query_tokens=compared.query_tokens,
            hit_tokens=compared.hit_tokens,
            evictions=self.evictions,
            failed_requests=len(self.lookups.failed),
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            steps=self.steps,
            queue_mean_sec=float(np.mean(self.waits)) if self.waits else None,
            queue_p99_sec=float(np.percentile(self.waits, 99)) if self.waits else None,
            span_sec=self.end_sec - self.begin_sec if self.end_sec > self.begin_sec else None,
            served=self.lookups.served(),
        )
