# SPDX-License-Identifier: Apache-2.0
"""What does a pool find that evicts what came in first, whether it was used since or not?

The blocks of a chain come in from first to last. So the beginning of a chain is evicted before its
end, and then no lookup finds the rest: a hit needs every block before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.whatif.ids import Ints
from analysis.whatif.references import References

_CELLS = 16_000_000
"""Sizes times blocks that are computed at once: 128 MB."""


def found(references: References, sizes: Sequence[int]) -> list[Ints]:
    """For each size of a pool in blocks, an array of the blocks that each request finds."""
    together = max(1, _CELLS // max(1, references.blocks))
    answers: list[Ints] = []
    for at in range(0, len(sizes), together):
        answers += _found(references, np.array(sizes[at : at + together]))
    return answers


def _found(references: References, sizes: Ints) -> list[Ints]:
    # By block and size: how many blocks had come in when this one did, itself included. The last
    # ``size`` of them are in the pool.
    came = np.full((references.blocks, len(sizes)), -sizes.max(initial=0))
    count = np.zeros(len(sizes), np.int64)
    answers = np.zeros((len(references), len(sizes)), np.int64)
    for request, chain in enumerate(references.chains):
        if not len(chain):
            continue
        before = came[chain]
        there = before > count - sizes
        answers[request] = np.where(there.all(axis=0), len(chain), there.argmin(axis=0))
        place = count + np.cumsum(~there, axis=0)
        after = np.where(there, before, place)
        # A block may be evicted to make room for one before it in its own chain.
        for size in np.flatnonzero((there & (before <= place - sizes)).any(axis=0)):
            place[-1, size] = _one_by_one(after[:, size], before[:, size], count[size], sizes[size])
        came[chain] = after
        count = place[-1]
    return list(np.minimum(answers, references.readable[:, None]).T)


def _one_by_one(after: Ints, before: Ints, count: int, size: int) -> int:
    """Take the blocks of a chain in one by one; returns how many blocks have come in by then."""
    for position, came in enumerate(before):
        if came <= count - size:
            count += 1
            after[position] = count
        else:
            after[position] = came
    return count
