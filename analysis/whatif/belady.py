# SPDX-License-Identifier: Apache-2.0
"""What could a pool of this size find at best, if it knew the future?

Belady's rule ("A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966), for a cache that need not take in what it is given: keep the blocks that are
asked for soonest. Nothing finds more blocks. Since whoever asks for a block asks for all before it
in its chain, no block is kept without those, so it is the bound for prefix hits, too.

What the pool keeps for a future request is one stretch of that request's chain, so the pass goes by
stretches instead of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from analysis.whatif.ids import Ints
from analysis.whatif.references import References, next_reader, runs


def found(references: References, sizes: Sequence[int]) -> list[Ints]:
    """Blocks that each request finds at best, in pools of each of these sizes."""
    requests = len(references)
    by_reader = runs(references.chains, next_reader(references))
    ahead = [
        [(start, start + length, reader) for _, start, length, reader in own if reader < requests]
        for own in by_reader.by_request(requests)
    ]
    return [np.array(_found(ahead, size), np.int64) for size in sizes]


def _found(ahead: Sequence[Sequence[tuple[int, int, int]]], size: int) -> list[int]:
    """``ahead``: of each request, the stretches of its chain that a later one asks for, from where
    to where, and which."""
    kept: dict[int, tuple[int, int]] = {}
    latest: list[int] = []
    total = 0
    answers = []
    for request, stretches in enumerate(ahead):
        begin, end = kept.pop(request, (0, 0))
        total -= end - begin
        answers.append(end)
        for start, stop, reader in stretches:
            if reader in kept:
                begin, end = kept[reader]
                total -= end - begin
                begin, end = min(begin, start), max(end, stop)
            else:
                begin, end = start, stop
                heappush(latest, -reader)
            kept[reader] = begin, end
            total += end - begin
        while total > size:
            reader = -latest[0]
            begin, end = kept[reader]
            dropped = min(total - size, end - begin)
            total -= dropped
            if dropped < end - begin:
                kept[reader] = begin, end - dropped
            else:
                del kept[reader]
                heappop(latest)
    return answers
