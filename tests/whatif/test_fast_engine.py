# SPDX-License-Identifier: Apache-2.0
"""The fast engine's passes against caches that are written down naively, block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.whatif import belady, ceiling, fifo, lru, policies, references
from analysis.whatif.ids import Ids
from analysis.whatif.references import References

Chain = tuple[int, ...]

RULES = (policies.Lfu, policies.Arc, policies.S3Fifo, policies.Sieve)


@st.composite
def chains(draw: st.DrawFn) -> list[Chain]:
    """Requests that begin like earlier ones and go on by themselves."""
    made: list[Chain] = []
    new = iter(range(10_000))
    for _ in range(draw(st.integers(1, 16))):
        begin: Chain = ()
        if made and draw(st.booleans()):
            like = made[draw(st.integers(0, len(made) - 1))]
            begin = like[: draw(st.integers(0, len(like)))]
        made.append(begin + tuple(next(new) for _ in range(draw(st.integers(0, 5)))))
    return made


@st.composite
def workloads(draw: st.DrawFn) -> References:
    """Chains of which lookups may find only a part."""
    made = draw(chains())
    readable = [draw(st.integers(max(0, len(chain) - 2), len(chain))) for chain in made]
    return given_chains(made, readable)


def given_chains(
    made: Sequence[Chain],
    readable: Sequence[int] | None = None,
    freed: Sequence[int] | None = None,
) -> References:
    lengths = np.array([len(chain) for chain in made], np.int64)
    return references.of_chains(
        Ids.of(made),
        readable=lengths if readable is None else np.array(readable, np.int64),
        needs=lengths,
        freed=np.arange(len(made)) if freed is None else np.array(freed, np.int64),
        counts=np.ones(len(made), np.bool_),
        block_size=1,
        input_tokens=lengths,
    )


def depth(chain: Sequence[int], there: object, readable: int) -> int:
    """Blocks found: all of the chain's up to the first that is missing."""
    found = 0
    while found < readable and chain[found] in there:  # type: ignore[operator]
        found += 1
    return found


def rows(found: References) -> list[tuple[list[int], int]]:
    return [
        (chain.tolist(), readable)
        for chain, readable in zip(found.chains, found.readable.tolist(), strict=True)
    ]


def naive_lru(found: References, size: int) -> list[int]:
    """A queue of blocks, the next to be evicted in front; a request puts its own at the end, the
    last one first."""
    queue: list[int] = []
    answers = []
    for chain, readable in rows(found):
        answers.append(depth(chain, queue, readable))
        queue = [block for block in queue if block not in chain] + chain[::-1]
        queue = queue[max(0, len(queue) - size) :]
    return answers


@given(workloads())
def test_one_pass_is_lru_at_every_size(found: References) -> None:
    distances = lru.distances(found)
    for size in range(1, found.blocks + 2):
        assert distances.found(size).tolist() == naive_lru(found, size)


@given(workloads())
def test_a_larger_pool_finds_more_until_it_is_enough(found: References) -> None:
    distances = lru.distances(found)
    totals = [int(distances.found(size).sum()) for size in range(found.blocks + 2)]
    assert all(before <= after for before, after in pairwise(totals))
    enough = distances.enough()
    assert totals[enough] == totals[-1]
    assert not enough or totals[enough - 1] < totals[enough]


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[list[Chain], list[int]]:
    """Chains, and a shuffled order of their ends that their begins allow: each is admitted at its
    number, and ends a while later."""
    made = draw(chains())
    ends = [number + draw(st.integers(0, 4)) + 0.5 for number in range(len(made))]
    order = sorted(range(len(made)), key=lambda number: (ends[number], number))
    freed = [0] * len(made)
    for rank, number in enumerate(order):
        freed[number] = rank
    return made, [int(end) for end in ends], freed  # type: ignore[return-value]


def vllm_pool(made: Sequence[Chain], ends: Sequence[int], size: int) -> list[int] | None:
    """A free queue and counts of holders, as vLLM's block pool has them; None where what runs does
    not fit."""
    holders: dict[int, int] = {}
    free: list[int] = []
    answers = []
    running: list[tuple[int, int]] = []
    for number, chain in enumerate(made):
        for end, earlier in sorted(running):
            if end < number:
                running.remove((end, earlier))
                for block in reversed(made[earlier]):
                    holders[block] -= 1
                    if not holders[block]:
                        del holders[block]
                        free.append(block)
        answers.append(depth(chain, {*holders, *free}, len(chain)))
        for block in chain:
            if block in free:
                free.remove(block)
            holders[block] = holders.get(block, 0) + 1
        running.append((ends[number], number))
        if len(holders) > size:
            return None
        del free[: max(0, len(holders) + len(free) - size)]
    return answers


@given(overlapping())
def test_held_blocks_stay_as_in_vllm(drawn: tuple[list[Chain], list[int], list[int]]) -> None:
    made, ends, freed = drawn
    distances = lru.distances(given_chains(made, freed=freed))
    for size in range(1, 40, 3):
        expected = vllm_pool(made, ends, size)
        if expected is not None:
            assert distances.found(size).tolist() == expected


def naive_fifo(found: References, size: int) -> list[int]:
    queue: deque[int] = deque()
    answers = []
    for chain, readable in rows(found):
        answers.append(depth(chain, queue, readable))
        for block in chain:
            if block not in queue:
                queue.append(block)
                if len(queue) > size:
                    queue.popleft()
    return answers


@given(workloads())
def test_fifo(found: References) -> None:
    sizes = range(1, found.blocks + 2)
    for size, answer in zip(sizes, fifo.found(found, sizes), strict=True):
        assert answer.tolist() == naive_fifo(found, size)


def naive_belady(found: References, size: int) -> list[int]:
    """Block by block: keep those that a lookup can find soonest, the beginning of a chain first."""
    every = rows(found)
    kept: set[int] = set()
    answers = []
    for number, (chain, readable) in enumerate(every):
        answers.append(depth(chain, kept, readable))
        wanted = []
        for block in {*kept, *chain}:
            later = (
                (next_number, other.index(block))
                for next_number, (other, may) in enumerate(every)
                if next_number > number and block in other[:may]
            )
            if (soonest := next(later, None)) is not None:
                wanted.append((soonest, block))
        kept = {block for _, block in sorted(wanted)[:size]}
    return answers


@given(workloads())
def test_belady(found: References) -> None:
    sizes = range(1, found.blocks + 2)
    for size, answer in zip(sizes, belady.found(found, sizes), strict=True):
        assert answer.tolist() == naive_belady(found, size)


@given(workloads())
def test_no_rule_finds_more_than_belady(found: References) -> None:
    sizes = range(2, 40, 5)
    bound = [int(answer.sum()) for answer in belady.found(found, sizes)]
    distances = lru.distances(found)
    rules = [
        [distances.found(size) for size in sizes],
        fifo.found(found, sizes),
        *(policies.found(found, sizes, rule) for rule in RULES),
    ]
    for answers in rules:
        for most, answer in zip(bound, answers, strict=True):
            assert answer.sum() <= most


@given(chains(), st.integers(1, 12), st.sampled_from(RULES))
def test_a_pool_never_has_more_than_its_size(
    made: list[Chain], size: int, rule: type[policies.Cache]
) -> None:
    cache = rule(size)
    blocks = {block for chain in made for block in chain}
    for chain in made:
        for block in reversed(chain):
            cache.use(block)
            assert block in cache
            assert sum(other in cache for other in blocks) <= size


def test_ids_that_do_not_stand_for_what_comes_before() -> None:
    # Block 7 after 1 is not block 7 after 2, nor is the second 1 the first.
    found = given_chains([(1, 7), (2, 7), (1, 1), (1, 7)])
    assert [chain.tolist() for chain in found.chains] == [[0, 3], [1, 4], [0, 2], [0, 3]]
    assert lru.distances(found).found(10).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("prompts", "within", "across"),
    [
        # The second turn begins with the first and its answer.
        ([(1, 2), (1, 2, 3, 4)], 2, 0),
        # Two that only begin alike.
        ([(1, 2), (1, 3)], 0, 1),
        ([(1, 2), (1, 3, 4)], 0, 1),
        # Both go on; each finds its own, and the system prompt was computed by the first.
        ([(1, 2), (1, 3), (1, 2, 4), (1, 3, 5)], 2 + 1, 1 + 1),
        # The same prompt again is another conversation.
        ([(1, 2, 3), (1, 2, 3)], 0, 2),
        # A third turn finds what the second one left.
        ([(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)], 2 + 4, 0),
    ],
)
def test_ceiling_by_where_it_comes_from(prompts: list[Chain], within: int, across: int) -> None:
    lengths = np.array([len(chain) for chain in prompts], np.int64)
    found = references.of_chains(
        Ids.of(prompts),
        # Prompts of whole blocks of 10 tokens: the last one is always computed.
        readable=lengths - 1 if prompts[0] == prompts[-1] else lengths,
        needs=lengths,
        freed=np.arange(len(prompts)),
        counts=np.ones(len(prompts), np.bool_),
        block_size=10,
        input_tokens=lengths * 10,
    )
    most = ceiling.measure([found])
    assert (most.within_tokens, most.across_tokens) == (10 * within, 10 * across)
    assert most.query_tokens == 10 * lengths.sum()
    assert most.new_tokens == most.query_tokens - most.within_tokens - most.across_tokens
    assert most.distinct_blocks == len({block for chain in prompts for block in chain})
