# SPDX-License-Identifier: Apache-2.0
"""What did the simulated engines do, all of them together?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from analysis.whatif.clock import StepTime
from analysis.whatif.common import Lookups
from analysis.whatif.configuration import Configuration
from analysis.whatif.host_memory import HostOutcome, confidence
from analysis.whatif.outcome import Outcome
from profilemate.simulation.host_memory import Moved


@dataclass
class Figures:
    """An engine's counts after the warm-up; the names are those of ``Outcome``.

    ``lookups``: by the requests' numbers among those of all engines.
    ``waits``: the seconds from each request's arrival to its first admission.
    ``begin_sec`` and ``end_sec``: the first arrival and the last end.
    ``moved``: what was copied to and from host memory.
    """

    lookups: Lookups = field(default_factory=Lookups)
    evictions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    waits: list[float] = field(default_factory=list)
    begin_sec: float = np.inf
    end_sec: float = -np.inf
    moved: Moved = field(default_factory=Moved)

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            lookups=self.lookups + other.lookups,
            evictions=self.evictions + other.evictions,
            preemptions=self.preemptions + other.preemptions,
            recomputed_tokens=self.recomputed_tokens + other.recomputed_tokens,
            steps=self.steps + other.steps,
            waits=self.waits + other.waits,
            begin_sec=min(self.begin_sec, other.begin_sec),
            end_sec=max(self.end_sec, other.end_sec),
            moved=self.moved + other.moved,
        )

    def outcome(
        self,
        configuration: Configuration,
        without: Collection[int] = (),
        step_time: StepTime | None = None,
    ) -> Outcome:
        """The figures as the outcome of this configuration.

        Args:
            configuration: what was simulated.
            without: the numbers of requests that another configuration could not serve.
            step_time: says what the tokens that were found in host memory would have taken.

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
            host=self._host(configuration, without, step_time),
        )

    def _host(
        self, configuration: Configuration, without: Collection[int], step_time: StepTime | None
    ) -> HostOutcome | None:
        memory = configuration.host
        if memory is None:
            return None
        hits = self.lookups.host_tokens(without)
        query = self.lookups.served(without).query_tokens
        token_sec = step_time.prefill_token_sec if step_time else 0.0
        compute = self.moved.loaded_tokens * token_sec if token_sec else None
        return HostOutcome(
            hit_tokens=hits,
            hit_rate=hits / query if query else None,
            gib=memory.gib,
            chunk_tokens=memory.chunk_blocks * configuration.block_size,
            bandwidth_gb_per_sec=memory.bytes_per_sec / 1e9,
            loaded_tokens=self.moved.loaded_tokens,
            loaded_bytes=self.moved.loaded_bytes,
            stored_bytes=self.moved.stored_bytes,
            load_sec=self.moved.load_sec,
            compute_sec=compute,
            saved_sec=None if compute is None else compute - self.moved.load_sec,
            confidence=confidence(step_time) if step_time and token_sec else None,
        )
