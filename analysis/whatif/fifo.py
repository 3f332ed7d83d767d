# SPDX-License-Identifier: Apache-2.0
"""What does a pool find that evicts whatever came in first, used since or not?

Blocks come in as they are allocated, the first of a chain first. So a chain's beginning goes before
its end, and what is left behind it cannot be found: a hit needs every block before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.whatif.ids import Ints
from analysis.whatif.references import References

_CELLS = 16_000_000
"""Sizes times blocks that are looked at together: 128 MB."""


def found(references: References, sizes: Sequence[int]) -> list[Ints]:
    """Blocks that each request finds in pools of each of these sizes."""
    together = max(1, _CELLS // max(1, references.blocks))
    answers: list[Ints] = []
    for at in range(0, len(sizes), together):
        answers += _found(references, np.array(sizes[at : at + together]))
    return answers


def _found(references: References, sizes: Ints) -> list[Ints]:
    # By block and size: how many blocks had come in when this one did, itself included. The
    # last ``size`` ones are there.
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
        # A block that is there may be evicted for one before it in its own chain.
        for size in np.flatnonzero((there & (before <= place - sizes)).any(axis=0)):
            place[-1, size] = _one_by_one(after[:, size], before[:, size], count[size], sizes[size])
        came[chain] = after
        count = place[-1]
    return list(np.minimum(answers, references.readable[:, None]).T)


def _one_by_one(after: Ints, before: Ints, count: int, size: int) -> int:
    """Let a chain's blocks in one after the other; returns how many have come in then."""
    for position, came in enumerate(before):
        if came <= count - size:
            count += 1
            after[position] = count
        else:
            after[position] = came
    return count
