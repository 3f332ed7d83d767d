# SPDX-License-Identifier: Apache-2.0
"""What could a pool of this size find at best, if it knew the future?

Belady's rule ("A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966) keeps the blocks that requests will ask for soonest. No rule finds more blocks
in a cache that may also refuse a block. A request that asks for a block asks for all before it in
its chain, so the rule keeps no block without those before it: it is the bound for prefix hits, too.

The pool keeps one stretch of the chain of each future request. So the pass goes by stretches, and
not by blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from analysis.whatif.ids import Ints
from analysis.whatif.references import References, next_reader, stretches


def found(references: References, sizes: Sequence[int]) -> list[Ints]:
    """For each size of a pool in blocks, an array of the blocks that each request finds at best."""
    requests = len(references)
    by_reader = stretches(references.chains, next_reader(references))
    ahead = [
        [(start, start + length, reader) for _, start, length, reader in own if reader < requests]
        for own in by_reader.by_request(requests)
    ]
    return [np.array(_found(ahead, size), np.int64) for size in sizes]


def _found(ahead: Sequence[Sequence[tuple[int, int, int]]], size: int) -> list[int]:
    """Blocks that each request finds.

    ``ahead``: for each request, the stretches of its chain that a later request asks for: where
    they begin and end, and the number of that request.
    """
    kept: dict[int, tuple[int, int]] = {}
    latest: list[int] = []
    total = 0
    answers = []
    for request, own in enumerate(ahead):
        begin, end = kept.pop(request, (0, 0))
        total -= end - begin
        answers.append(end)
        for start, stop, reader in own:
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
