# SPDX-License-Identifier: Apache-2.0
"""What does a pool of any size find if it evicts as vLLM does?

vLLM puts freed blocks into one queue and allocates from its front (``free_blocks`` in
vllm/v1/core/block_pool.py). When a request ends, its blocks are queued, the last one first. So the
first block to be evicted is the last one of the chain that was freed longest ago. Blocks that a
request holds are not in the queue.

This is a stack algorithm (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970): at any moment a pool with one block more has the
blocks of the smaller one and one more. So each reference has a *distance*, the smallest pool that
finds the block: the number of different blocks that are held, or were freed after it, or stand
before it in its chain, itself included. Distances only grow along a chain, so that a hit needs
every block before it without a further rule. One pass gives the answer for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.whatif.ids import Ints
from analysis.whatif.references import References, Stretches, last_freed, stretches

NEVER = -1


@dataclass(frozen=True)
class Distances:
    """``stretches``: blocks with the same last holder. ``before``: the distance of the first block
    of each stretch less one, ``NEVER`` where its blocks are new."""

    references: References
    stretches: Stretches
    before: Ints

    def found(self, num_blocks: int) -> Ints:
        """The blocks that each request finds in a pool of ``num_blocks`` usable blocks."""
        within = np.clip(num_blocks - self.before, 0, self.stretches.length)
        within[self.before == NEVER] = 0
        total = np.zeros(len(self.references), np.int64)
        np.add.at(total, self.stretches.request, within)
        return np.minimum(total, self.references.readable)

    def enough(self) -> int:
        """The smallest pool that finds what a pool of any size finds."""
        of = self.stretches
        readable = self.references.readable[of.request]
        last = np.minimum(of.length, readable - of.start)
        counts = self.references.counts[of.request]
        found = (self.before != NEVER) & (last > 0) & counts
        return int((self.before + last)[found].max(initial=0))


def distances(references: References) -> Distances:
    """The distances of all references, in one pass over their stretches."""
    requests = len(references)
    by_holder = stretches(references.chains, last_freed(references))
    before = np.full(len(by_holder.key), NEVER)
    stack = _Stack(requests)
    for own, own_stretches in zip(
        references.freed.tolist(), by_holder.by_request(requests), strict=True
    ):
        for number, _, _, holder in own_stretches:
            if holder != NEVER:
                before[number] = stack.above(holder)
        for _, _, length, holder in own_stretches:
            # A block that another request still holds when this one ends keeps its place.
            if holder < own:
                stack.move(length, holder, own)
    return Distances(references, by_holder, before)


class _Stack:
    """How many different blocks have each request as their last holder.

    It is a Fenwick tree over the order in which requests free their blocks.
    """

    def __init__(self, requests: int) -> None:
        # Every way up ends at the last place, where two ways have met.
        self._sums = [0] * ((1 << requests.bit_length()) + 1)
        self._total = 0

    def above(self, rank: int) -> int:
        """Blocks whose last holder has a higher rank."""
        below, at, sums = 0, rank + 1, self._sums
        while at:
            below += sums[at]
            at &= at - 1
        return self._total - below

    def move(self, blocks: int, old: int, new: int) -> None:
        """Give so many blocks another last holder. They are new where ``old`` is ``NEVER``."""
        sums = self._sums
        end = len(sums) - 1
        at = end
        if old == NEVER:
            self._total += blocks
        else:
            at = old + 1
        to = new + 1
        # Above the place where both ways meet, the blocks are counted as before.
        while at != to:
            if at < to:
                sums[at] -= blocks
                at += at & -at
            else:
                sums[to] += blocks
                to += to & -to
