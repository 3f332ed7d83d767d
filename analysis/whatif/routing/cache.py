# SPDX-License-Identifier: Apache-2.0
"""Which contents does a replica hold, block by block, if it evicts as vLLM does?

``analysis.whatif.lru`` answers for all sizes in one pass, but only where it is known beforehand
which requests come. A router decides by what is there now, so this cache goes step by step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Cache:
    """A pool of ``size`` usable blocks, each of which has a number that stands for its content.

    Blocks that running requests hold are never evicted: where they are more than the pool has, the
    pool is larger meanwhile. Of the others, the first in the queue goes first.
    """

    def __init__(self, size: int) -> None:
        self.evictions = 0
        self._size = size
        self._holders: dict[int, int] = {}
        self._queue: OrderedDict[int, None] = OrderedDict()

    def depth(self, chain: Sequence[int]) -> int:
        """How many blocks of a chain are there, up to the first that is not."""
        holders, queue = self._holders, self._queue
        for at, block in enumerate(chain):
            if block not in holders and block not in queue:
                return at
        return len(chain)

    def hold(self, chain: Sequence[int]) -> None:
        """A request holds these blocks from now on."""
        holders, queue = self._holders, self._queue
        for block in chain:
            if block in holders:
                holders[block] += 1
            else:
                queue.pop(block, None)
                holders[block] = 1
        self._make_room()

    def release(self, chain: Sequence[int]) -> None:
        """A request lets go of its blocks: the last one of them is the first to be evicted."""
        holders, queue = self._holders, self._queue
        for block in reversed(chain):
            left = holders[block] - 1
            if left:
                holders[block] = left
            else:
                del holders[block]
                queue[block] = None
        self._make_room()

    def _make_room(self) -> None:
        queue = self._queue
        excess = min(len(self._holders) + len(queue) - self._size, len(queue))
        for _ in range(excess):
            queue.popitem(last=False)
            self.evictions += 1
