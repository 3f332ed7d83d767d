# SPDX-License-Identifier: Apache-2.0
"""What emptied the recorded cache on purpose, done again to the simulated one.

A reset while nothing ran keeps its place among the requests: it waits for those that ran before it,
and those that ran after it wait for it. So a training loop that resets the cache after each round
does so in a slower configuration, too. A reset while requests ran, and an eviction on request,
come at their time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.whatif.configuration import Configuration
from analysis.whatif.drops import EVERYTHING
from analysis.whatif.workload import Workload
from profilemate.simulation import parts


class Drops:
    """The drops of one engine that are still to come.

    Args:
        workload: the engine's requests and drops.
        scheduler: vLLM's.
        configuration: the engine's; where its blocks have another size than the recorded ones,
            contents have other ids, and only resets are done; so where it has several groups.

    """

    def __init__(self, workload: Workload, scheduler: Any, configuration: Configuration) -> None:
        is_same_size = configuration.block_size == workload.block_size and not configuration.groups
        self._scheduler = scheduler
        self._workload = workload
        self._drops = workload.drops if is_same_size else workload.drops.resets()
        self._next = 0
        self._wanted = np.unique(self._drops.content[~self._drops.is_reset])
        self._holders: dict[int, tuple[Any, int]] = {}

    @property
    def next_sec(self) -> float:
        """When the next one was; infinite after the last."""
        return float(self._drops.at_sec[self._next]) if self._next < len(self._drops) else np.inf

    @property
    def waits(self) -> bool:
        """Whether the next one is to find the engine at rest."""
        drops = self._drops
        return bool(drops.at_rest[self._next] and drops.is_reset[self._next])

    def arrived(self, number: int, request: Any) -> None:
        """Keep the request if it has a content that will be evicted on request."""
        if not len(self._wanted):
            return
        first = int(self._workload.input_tokens[number]) // self._workload.block_size
        prompt = self._workload.prompt_ids[number][:first].tolist()
        chain = [*prompt, *self._workload.output_ids[number].tolist()]
        for position in np.flatnonzero(np.isin(chain, self._wanted)).tolist():
            self._holders[chain[position]] = request, position

    def do_next(self) -> None:
        """Drop what the session dropped next."""
        content = int(self._drops.content[self._next])
        self._next += 1
        if content == EVERYTHING:
            known = parts.known(
                type(self._scheduler).reset_prefix_cache, {"reset_running_requests": True}
            )
            self._scheduler.reset_prefix_cache(**known)
            return
        request, position = self._holders.get(content, (None, 0))
        if request is None or position >= len(request.block_hashes):
            return
        pool = self._scheduler.kv_cache_manager.block_pool
        # Each copy goes: the session dropped the last one.
        while found := pool.get_cached_block(request.block_hashes[position], [0]):
            for block in found:
                pool._maybe_evict_cached_block(block)
