# SPDX-License-Identifier: Apache-2.0
"""Which blocks did each request look for and leave behind, and when was each used before and next?

The fast engine sees a workload like this. Requests come in the order of admission, and each does
everything at once: it finds the blocks of its prompt up to the first that is not cached, and then
holds its whole chain of blocks, those of its answer included. A *reference* is a block of a chain.

From one reset of the cache to the next is an *epoch*. Nothing is found of an earlier epoch, so the
same content is another block in each. A request that a reset preempts computes its blocks again: it
stands there once more in the next epoch, without a lookup. A content that was evicted on request is
another block from then on, and so is what follows it in a chain: no lookup gets past it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from analysis.whatif.drops import HALF_TICK_SEC, Drops
from analysis.whatif.ids import Ids, Ints
from analysis.whatif.workload import Bools, Floats, Workload


@dataclass(frozen=True)
class References:
    """An entry for each request, in the order of admission.

    ``chains``: its blocks, first to last, as numbers below ``blocks``; a number stands for a
    content with everything before it, in one epoch. ``contents``: how many different contents
    they have, whatever the epoch. ``readable``: how many of them a lookup can find: never the
    block with the prompt's last token, which vLLM always computes. ``needs``: blocks that it holds
    at its end. ``freed``: its rank in the order in which requests free their blocks. ``counts``: it
    is not part of the warm-up. ``epoch``: in which it is. ``again``: it was preempted by a reset,
    and is there once more; such a row does not count. ``block_size`` and ``input_tokens``: in
    tokens.
    """

    chains: Ids
    blocks: int
    readable: Ints
    needs: Ints
    freed: Ints
    counts: Bools
    block_size: int
    input_tokens: Ints
    contents: int
    epoch: Ints
    again: Bools

    def __len__(self) -> int:
        return len(self.readable)

    @property
    def can_be_found(self) -> Bools:
        """For each reference, whether the request's lookup can find the block."""
        return self.chains.positions < np.repeat(self.readable, self.chains.lengths)


def of_workload(workload: Workload) -> References:
    """The references of one engine's workload, without requests that were never admitted."""
    ran = workload.take(np.flatnonzero(workload.computed_tokens > 0))
    admitted = np.where(np.isfinite(ran.admitted_sec), ran.admitted_sec, ran.arrival_sec)
    order = np.argsort(admitted, kind="stable")
    ran, admitted = ran.take(order), admitted[order]
    # Where the ends are not known, each request ends before the next one begins.
    ended = np.maximum(np.where(np.isfinite(ran.finish_sec), ran.finish_sec, admitted), admitted)
    resets = workload.drops.at_sec[workload.drops.is_reset]
    parts = _by_epoch(admitted, ended, resets)
    ran, admitted, ended = ran.take(parts.row), parts.begin_sec, parts.end_sec
    return of_chains(
        ran.chains(),
        begin_sec=admitted,
        drops=workload.drops,
        epoch=parts.epoch,
        again=parts.again,
        readable=np.where(parts.again, 0, np.maximum(ran.input_tokens - 1, 0) // ran.block_size),
        needs=-(-ran.computed_tokens // ran.block_size),
        freed=np.argsort(np.argsort(ended, kind="stable"), kind="stable"),
        counts=ran.counts & ~parts.again,
        block_size=ran.block_size,
        input_tokens=ran.input_tokens,
    )


@dataclass(frozen=True)
class _Parts:
    """The parts that resets cut requests into, in the order in which they begin. ``row``: the
    request."""

    row: Ints
    begin_sec: Floats
    end_sec: Floats
    epoch: Ints
    again: Bools


def _by_epoch(begin: Floats, end: Floats, resets: Floats) -> _Parts:
    first = np.searchsorted(resets, begin + HALF_TICK_SEC)
    cuts = np.maximum(np.searchsorted(resets, end - HALF_TICK_SEC) - first, 0)
    row = np.repeat(np.arange(len(begin)), 1 + cuts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(1 + cuts) - 1 - cuts, 1 + cuts)
    epoch = first[row] + part
    times = np.append(resets, np.inf)
    begin_sec = np.where(part > 0, times[np.maximum(epoch - 1, 0)], begin[row])
    end_sec = np.where(part < cuts[row], times[epoch], end[row])
    order = np.argsort(begin_sec, kind="stable")
    return _Parts(row[order], begin_sec[order], end_sec[order], epoch[order], (part > 0)[order])


def of_chains(
    chains: Ids,
    *,
    readable: Ints,
    needs: Ints,
    freed: Ints,
    counts: Bools,
    block_size: int,
    input_tokens: Ints,
    epoch: Ints | None = None,
    again: Bools | None = None,
    begin_sec: Floats | None = None,
    drops: Drops | None = None,
) -> References:
    """References of chains with ids of any kind.

    The arguments have an entry for each request, and become the fields of the same name.
    ``readable`` may be longer than the chain. ``begin_sec`` is when each request is looked up, and
    ``drops`` what was dropped on purpose.
    """
    epochs = np.zeros(len(readable), np.int64) if epoch is None else epoch
    numbers, contents = _numbered(chains)
    blocks = contents
    if begin_sec is not None and drops is not None and len(drops):
        evicted = _evicted_before(chains, begin_sec, drops.take(~drops.is_reset))
        numbers, blocks = _told_apart(numbers, epochs[chains.rows], evicted)
    return References(
        chains=Ids(numbers, chains.offsets),
        blocks=blocks,
        readable=np.minimum(readable, chains.lengths),
        needs=needs,
        freed=freed,
        counts=counts,
        block_size=block_size,
        input_tokens=input_tokens,
        contents=contents,
        epoch=epochs,
        again=np.zeros(len(readable), np.bool_) if again is None else again,
    )


def _evicted_before(chains: Ids, begin_sec: Floats, evicted: Drops) -> Ints:
    """For each reference, how often it or a block before it had been evicted on request."""
    asked = np.flatnonzero(np.isin(chains.values, evicted.content))
    content = np.concatenate([evicted.content, chains.values[asked]])
    at_sec = np.concatenate([evicted.at_sec, begin_sec[chains.rows[asked]]])
    is_asked = np.arange(len(content)) >= len(evicted)
    order = np.lexsort((is_asked, at_sec, content))
    earlier = np.cumsum(~is_asked[order])
    # Less those of all contents that sort before it.
    earlier -= np.searchsorted(np.sort(evicted.content), content[order])
    times = np.zeros(len(chains.values), np.int64)
    times[asked[order[is_asked[order]] - len(evicted)]] = earlier[is_asked[order]]
    total = np.concatenate([[0], np.cumsum(times)])
    return np.asarray(total[1:] - total[chains.offsets[:-1]][chains.rows], np.int64)


def _told_apart(numbers: Ints, *by: Ints) -> tuple[Ints, int]:
    """Other numbers, the same where the numbers and all else are, and how many."""
    for more in by:
        together = numbers * (int(more.max(initial=0)) + 1) + more
        numbers = np.unique(together, return_inverse=True)[1].ravel()
    return numbers, int(numbers.max(initial=-1)) + 1


def _numbered(chains: Ids) -> tuple[Ints, int]:
    """A number for each block, the same where its content and all before it are, and how many."""
    values = np.unique(chains.values, return_inverse=True)[1].ravel()
    before = np.full(len(values), -1)
    before[1:] = values[:-1]
    before[chains.positions == 0] = -1
    order = np.argsort(values, kind="stable")
    same = values[order][1:] == values[order][:-1]
    if (before[order][1:] == before[order][:-1])[same].all():
        return values, int(values.max(initial=-1)) + 1
    return _numbered_by_prefix(values, chains)


def _numbered_by_prefix(values: Ints, chains: Ids) -> tuple[Ints, int]:
    """The same for a trace whose ids do not stand for all before them, too."""
    numbers = np.empty(len(values), np.int64)
    lengths, begins, blocks = chains.lengths, chains.offsets[:-1], 0
    for position in range(int(lengths.max(initial=0))):
        at = begins[lengths > position] + position
        parents = numbers[at - 1] if position else np.zeros(len(at), np.int64)
        pairs = np.stack([parents, values[at]])
        numbers[at] = blocks + np.unique(pairs, axis=1, return_inverse=True)[1].ravel()
        blocks = int(numbers[at].max()) + 1
    return numbers, blocks


def last_freed(references: References) -> Ints:
    """For each reference: of the requests that had the block before, the rank of the one that frees
    it last; -1 where none had it."""
    order, block = _by_block(references)
    above = len(references) + 1
    rank = references.freed[references.chains.rows[order]]
    latest = np.maximum.accumulate(rank + block * above) - block * above
    found = np.full(len(order), -1)
    found[order[1:]] = np.where(block[1:] == block[:-1], latest[:-1], -1)
    return found


def first_user(references: References) -> Ints:
    """For each reference, the first request that had the block."""
    order, block = _by_block(references)
    begins = np.ones(len(order), np.bool_)
    begins[1:] = block[1:] != block[:-1]
    first = references.chains.rows[order[begins]]
    return first[references.chains.values]


def next_reader(references: References) -> Ints:
    """For each reference, the next request whose lookup can find the block; the number of requests
    where there is none."""
    order, block = _by_block(references)
    never = len(references)
    reader = np.where(references.can_be_found, references.chains.rows, never)[order]
    above = never + 1
    # From the end: the smallest reader that follows, of this block or of a later one.
    soonest = np.minimum.accumulate((reader + block * above)[::-1])[::-1]
    found = np.full(len(order), never)
    found[order[:-1]] = np.where(soonest[1:] // above == block[:-1], soonest[1:] % above, never)
    return found


def _by_block(references: References) -> tuple[Ints, Ints]:
    """The references sorted by block and then by request, and the block of each."""
    order = np.argsort(references.chains.values, kind="stable")
    return order, references.chains.values[order]


@dataclass(frozen=True)
class Stretches:
    """Consecutive blocks of a chain with the same ``key``, in order. Most requests have few.

    ``request``: number of the chain. ``start``: place in the chain. ``length``: in blocks.
    """

    request: Ints
    start: Ints
    length: Ints
    key: Ints

    def by_request(self, requests: int) -> Iterator[list[tuple[int, int, int, int]]]:
        """For each request, the number, start, length and key of each of its stretches."""
        rows = list(
            zip(
                range(len(self.key)),
                self.start.tolist(),
                self.length.tolist(),
                self.key.tolist(),
                strict=True,
            )
        )
        ends = np.searchsorted(self.request, np.arange(requests), side="right").tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            yield rows[begin:end]


def stretches(chains: Ids, key: Ints) -> Stretches:
    """The stretches of these chains whose blocks have the same ``key``."""
    request = chains.rows
    begins = np.ones(len(key), np.bool_)
    begins[1:] = (request[1:] != request[:-1]) | (key[1:] != key[:-1])
    at = np.flatnonzero(begins)
    return Stretches(request[at], chains.positions[at], np.diff(np.append(at, len(key))), key[at])
