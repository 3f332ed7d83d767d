# SPDX-License-Identifier: Apache-2.0
"""The session's totals, for kv_cache_summary.txt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_COUNTS = (
    *("total_blocks", "allocated", "freed", "evictions", "preemptions", "requests", "peak_held"),
    *("_lifetime_ns", "_idle_ns", "_held_now", "_blocks_lost"),
)


class Totals:
    """Counts over all engines and pools, of blocks where the name does not say otherwise."""

    def __init__(self) -> None:
        self.total_blocks = 0
        self.allocated = 0
        self.freed = 0
        self.evictions = 0
        self.preemptions = 0
        self.requests = 0
        self.peak_held = 0
        self._lifetime_ns = 0
        self._idle_ns = 0
        self._held: dict[tuple[int, int], int] = {}
        self._held_now = 0
        self._blocks_lost = False

    def add_pools(self, totals: Iterable[int]) -> None:
        """Pools appeared, of this many blocks each."""
        self.total_blocks += sum(totals)

    def held(self, rank: int, pool: int, blocks: int) -> None:
        """A pool's held blocks changed to this many."""
        key = (rank, pool)
        self._held_now += blocks - self._held.get(key, 0)
        self._held[key] = blocks
        self.peak_held = max(self.peak_held, self._held_now)

    def evicted(self, blocks: int, lifetime_ns: int, idle_ns: int) -> None:
        """So many cached blocks lost their content; the times are sums over them."""
        self.evictions += blocks
        self._lifetime_ns += lifetime_ns
        self._idle_ns += idle_ns

    def lose_blocks(self) -> None:
        """What happens to blocks is no longer recorded."""
        self._blocks_lost = True

    def saved(self) -> dict[str, Any]:
        """All of it, as JSON."""
        held = [[*key, blocks] for key, blocks in self._held.items()]
        return {**{name: getattr(self, name) for name in _COUNTS}, "held": held}

    def restore(self, saved: dict[str, Any]) -> None:
        """Be as when it was ``saved``."""
        for name in _COUNTS:
            setattr(self, name, saved[name])
        self._held = {(rank, pool): blocks for rank, pool, blocks in saved["held"]}

    def summary(self) -> str:
        """The text of kv_cache_summary.txt."""
        evictions = max(1, self.evictions)
        peak = 100 * self.peak_held / self.total_blocks if self.total_blocks else 0.0
        lost = "The figures of blocks end early: see metadata.json, lost\n"
        lost = lost if self._blocks_lost else ""
        return (
            "KV Cache Statistics\n"
            f"{'=' * 50}\n\n"
            f"Total blocks available: {self.total_blocks}\n"
            f"Total allocations: {self.allocated}\n"
            f"Total deallocations: {self.freed}\n"
            f"Peak blocks used: {self.peak_held}\n"
            f"Peak usage: {peak:.2f}%\n"
            f"Total evictions: {self.evictions}\n"
            f"Avg block lifetime: {self._lifetime_ns / evictions / 1e9:.2f}s\n"
            f"Avg idle before eviction: {self._idle_ns / evictions / 1e9:.2f}s\n"
            f"Total preemptions: {self.preemptions}\n"
            f"Finished requests: {self.requests}\n{lost}"
        )
