# SPDX-License-Identifier: Apache-2.0
"""What does a pool find that evicts by a rule from the literature?

Each rule sees the blocks of a chain one by one, the last one first. So where it makes no
difference between blocks, it evicts the end of a chain before its beginning. A lookup finds the
blocks of the chain up to the first that is missing. A block behind that is computed again, which
the rule takes for a use of it. Unlike in vLLM, a rule may evict blocks that requests hold: the
figures are a little off for a pool that is hardly larger than what running requests hold.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from analysis.whatif.ids import Ints
from analysis.whatif.references import References


class Cache(Protocol):
    """A pool of so many blocks under some rule."""

    def __init__(self, size: int) -> None: ...

    def __contains__(self, block: int) -> bool:
        """Whether the block is there."""

    def use(self, block: int) -> None:
        """Use the block. If it is not in the pool it comes in, and another one may be evicted."""


def found(references: References, sizes: Sequence[int], rule: type[Cache]) -> list[Ints]:
    """For each size of a pool in blocks, an array of the blocks that each request finds."""
    chains = [chain.tolist() for chain in references.chains]
    epochs = references.epoch.tolist()
    return [np.minimum(_found(chains, epochs, rule, size), references.readable) for size in sizes]


def _found(
    chains: Sequence[Sequence[int]], epochs: Sequence[int], rule: type[Cache], size: int
) -> Ints:
    answers = []
    cache, now = rule(size), 0
    use = cache.use
    for chain, epoch in zip(chains, epochs, strict=True):
        if epoch != now:
            # A reset leaves an empty pool.
            cache, now = rule(size), epoch
            use = cache.use
        depth = 0
        for block in chain:
            if block not in cache:
                break
            depth += 1
        answers.append(depth)
        for block in reversed(chain):
            use(block)
    return np.array(answers, np.int64)


class Lfu:
    """Least frequently used: evicts the block that was used least often since it came in, and of
    several the one that was not used for longest."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._uses: dict[int, int] = {}
        self._by_uses: dict[int, OrderedDict[int, None]] = {}
        self._least = 1

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        uses = self._uses.get(block)
        if uses is None:
            if len(self._uses) >= self._size:
                self._evict()
            uses = self._least = 0
        else:
            alike = self._by_uses[uses]
            del alike[block]
            if not alike:
                del self._by_uses[uses]
        if self._least == uses and uses not in self._by_uses:
            self._least = uses + 1
        self._uses[block] = uses + 1
        self._by_uses.setdefault(uses + 1, OrderedDict())[block] = None

    def _evict(self) -> None:
        alike = self._by_uses[self._least]
        victim, _ = alike.popitem(last=False)
        del self._uses[victim]
        if not alike:
            del self._by_uses[self._least]


class Arc:
    """Adaptive replacement cache: one LRU list of blocks used once and one of blocks used again. A
    use of a block that it evicted lately shifts the shares of the two (Megiddo and Modha, "ARC: a
    self-tuning, low overhead replacement cache", FAST '03, figure 4)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._share = 0.0
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._gone_once: OrderedDict[int, None] = OrderedDict()
        self._gone_again: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def use(self, block: int) -> None:
        if block in self._again:
            self._again.move_to_end(block)
        elif block in self._once:
            del self._once[block]
            self._again[block] = None
        elif block in self._gone_once:
            step = max(1.0, len(self._gone_again) / len(self._gone_once))
            self._share = min(float(self._size), self._share + step)
            self._make_room(was_used_again=False)
            del self._gone_once[block]
            self._again[block] = None
        elif block in self._gone_again:
            step = max(1.0, len(self._gone_once) / len(self._gone_again))
            self._share = max(0.0, self._share - step)
            self._make_room(was_used_again=True)
            del self._gone_again[block]
            self._again[block] = None
        else:
            self._take_in(block)

    def _take_in(self, block: int) -> None:
        known_once = len(self._once) + len(self._gone_once)
        known = known_once + len(self._again) + len(self._gone_again)
        if known_once == self._size:
            if len(self._once) < self._size:
                self._gone_once.popitem(last=False)
                self._make_room(was_used_again=False)
            else:
                self._once.popitem(last=False)
        elif known >= self._size:
            if known >= 2 * self._size:
                self._gone_again.popitem(last=False)
            self._make_room(was_used_again=False)
        self._once[block] = None

    def _make_room(self, *, was_used_again: bool) -> None:
        once = len(self._once)
        if once and (once > self._share or (was_used_again and once == self._share)):
            victim, _ = self._once.popitem(last=False)
            self._gone_once[victim] = None
        else:
            victim, _ = self._again.popitem(last=False)
            self._gone_again[victim] = None


class S3Fifo:
    """Three FIFO queues: a small one, which blocks leave quickly if they are not used again, a main
    one, and one of the names of blocks that left the small one lately (Yang, Zhang, Qiu, Yue and
    Vinayak, "FIFO queues are all you need for cache eviction", SOSP '23). As in libCacheSim, its
    authors' simulator, blocks that find no room in the small queue go to the main one until the
    pool is full."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._small_size = max(1, size // 10)
        self._main_size = size - self._small_size
        self._ghosts_size = size * 9 // 10
        self._uses: dict[int, int] = {}
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._was_full = False

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] += 1
            return
        is_known = block in self._ghosts
        if is_known:
            del self._ghosts[block]
        while len(self._uses) >= self._size:
            self._was_full = True
            if len(self._main) > self._main_size or not self._small:
                self._evict_main()
            else:
                self._evict_small()
        is_small_full = len(self._small) >= self._small_size
        if is_known or (is_small_full and not self._was_full):
            self._main.append(block)
        else:
            self._small.append(block)
        self._uses[block] = 0

    def _evict_small(self) -> None:
        while self._small:
            block = self._small.popleft()
            if self._uses[block] < 2:
                del self._uses[block]
                self._ghosts[block] = None
                if len(self._ghosts) > self._ghosts_size:
                    self._ghosts.popitem(last=False)
                return
            self._uses[block] = 0
            self._main.append(block)

    def _evict_main(self) -> None:
        while self._main:
            block = self._main.popleft()
            if not self._uses[block]:
                del self._uses[block]
                return
            self._uses[block] = min(self._uses[block], 3) - 1
            self._main.append(block)


class Sieve:
    """One FIFO queue and a hand that moves from its oldest block to its newest. Blocks that were
    used since the hand last passed them stay; the first that was not is evicted (Zhang, Yang, Yue,
    Vigfusson and Rashmi, "SIEVE is simpler than LRU", NSDI '24, algorithm 1)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used: dict[int, bool] = {}
        self._newer: dict[int, int | None] = {}
        self._older: dict[int, int | None] = {}
        self._newest: int | None = None
        self._oldest: int | None = None
        self._hand: int | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._used

    def use(self, block: int) -> None:
        if block in self._used:
            self._used[block] = True
            return
        if len(self._used) >= self._size:
            self._evict()
        self._used[block] = False
        self._newer[block], self._older[block] = None, self._newest
        if self._newest is None:
            self._oldest = block
        else:
            self._newer[self._newest] = block
        self._newest = block

    def _evict(self) -> None:
        at = self._oldest if self._hand is None else self._hand
        while at is not None and self._used[at]:
            self._used[at] = False
            at = self._newer[at]
            if at is None:
                at = self._oldest
        assert at is not None, "a pool that is full has a block"
        self._hand = self._newer[at]
        self._unlink(at)

    def _unlink(self, block: int) -> None:
        newer, older = self._newer.pop(block), self._older.pop(block)
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer
        del self._used[block]
