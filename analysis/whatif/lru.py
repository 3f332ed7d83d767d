# SPDX-License-Identifier: Apache-2.0
"""What does a pool of any size find if it evicts as vLLM does?

vLLM keeps freed blocks in one queue and takes from its front. A request's blocks are queued when it
ends, the last one first, so what goes first is the end of the chain that was let go of longest ago;
blocks that a request holds are not in the queue (``free_blocks`` in vllm/v1/core/block_pool.py).

That is a stack algorithm (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970): at any moment the pool with one block more has what
the smaller one has, and one block besides. So each reference has a *distance*, the smallest pool
that finds the block: how many distinct blocks are held or were freed after it, and before it in
its chain, itself included. A chain's distances only grow along it, which makes the rule that a hit
needs every block before it hold by itself. One pass gives all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.whatif.ids import Ints
from analysis.whatif.references import References, Runs, last_freed, runs

NEVER = -1


@dataclass(frozen=True)
class Distances:
    """``runs``: by who let go of their blocks last. ``before``: the distance of each run's first
    block less one, ``NEVER`` where the blocks are new."""

    references: References
    runs: Runs
    before: Ints

    def found(self, num_blocks: int) -> Ints:
        """Blocks that each request finds in a pool of this size."""
        within = np.clip(num_blocks - self.before, 0, self.runs.length)
        within[self.before == NEVER] = 0
        total = np.zeros(len(self.references), np.int64)
        np.add.at(total, self.runs.request, within)
        return np.minimum(total, self.references.readable)

    def enough(self) -> int:
        """The smallest pool that finds all that any pool does."""
        readable = self.references.readable[self.runs.request]
        last = np.minimum(self.runs.length, readable - self.runs.start)
        counts = self.references.counts[self.runs.request]
        found = (self.before != NEVER) & (last > 0) & counts
        return int((self.before + last)[found].max(initial=0))


def distances(references: References) -> Distances:
    """The distances of all references, in one pass over their runs."""
    requests = len(references)
    by_holder = runs(references.chains, last_freed(references))
    before = np.full(len(by_holder.key), NEVER)
    stack = _Stack(requests)
    for own, own_runs in zip(
        references.freed.tolist(), by_holder.by_request(requests), strict=True
    ):
        for number, _, _, holder in own_runs:
            if holder != NEVER:
                before[number] = stack.above(holder)
        for _, _, length, holder in own_runs:
            # A block that another request still holds when this one ends stays where it is.
            if holder < own:
                stack.move(length, holder, own)
    return Distances(references, by_holder, before)


class _Stack:
    """How many distinct blocks each request is the last to let go of, as a Fenwick tree over the
    order in which they do."""

    def __init__(self, requests: int) -> None:
        self._sums = [0] * (requests + 1)
        self._total = 0

    def above(self, rank: int) -> int:
        """Blocks whose last holder has a higher rank."""
        below, at = 0, rank + 1
        while at:
            below += self._sums[at]
            at &= at - 1
        return self._total - below

    def move(self, blocks: int, old: int, new: int) -> None:
        """So many blocks, new ones where ``old`` is ``NEVER``, have another last holder."""
        if old == NEVER:
            self._total += blocks
        else:
            self._add(-blocks, old)
        self._add(blocks, new)

    def _add(self, blocks: int, rank: int) -> None:
        at = rank + 1
        while at < len(self._sums):
            self._sums[at] += blocks
            at += at & -at
