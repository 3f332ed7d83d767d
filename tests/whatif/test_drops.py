# SPDX-License-Identifier: Apache-2.0
"""Replays drop what the session dropped: resets and evictions on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.whatif import fast, policies
from analysis.whatif.workload import read_workload
from tests.support.scheduler import RequestMaker, tokens
from tests.whatif import truth
from tests.whatif.simulating import Recorded
from tests.whatif.test_exact import LIMITS, SMALL, counts, hurried
from tests.whatif.test_fast_engine import given_chains
from tests.whatif.truth import Truth

pytestmark = pytest.mark.usefixtures("hooks_on")

PROMPTS, LENGTH, ROUNDS = 20, 321, 4
FULL = LENGTH // 16
FOUND = 3 * PROMPTS * FULL * 16
"""Tokens that the rounds after the first would find if nothing was dropped."""


def in_rounds(model: Path, folder: Path, *, resets: bool = True) -> Truth:
    """Twenty prompts of 321 tokens in each of four rounds, a reset between two, in 999 blocks."""
    make = RequestMaker(16)
    requests = [
        (10_000.0 * number, make(f"{number}-{prompt}", tokens(prompt, LENGTH), 4))
        for number in range(ROUNDS)
        for prompt in range(PROMPTS)
    ]
    return truth.run(model, folder, 1_000, requests=requests, abort=between if resets else kept)


def between(scheduler: Any, step: int) -> list[str]:
    """Reset the cache when a round's requests have come, and nothing of the last runs any more."""
    if step and len(scheduler.waiting) == PROMPTS and not scheduler.running:
        assert scheduler.reset_prefix_cache()
    return []


def kept(scheduler: Any, step: int) -> list[str]:
    return []


def at_work(every: int) -> Callable[[Any, int], list[str]]:
    """Reset the cache every so many steps, whatever runs."""

    def reset(scheduler: Any, step: int) -> list[str]:
        if step % every == every - 1:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        return []

    return reset


def test_rounds_with_resets_find_nothing(model: Path, tmp_path: Path) -> None:
    true = in_rounds(model, tmp_path / "s")
    recorded = Recorded(true.session)
    assert len(recorded.workload.drops) == ROUNDS - 1
    assert recorded.measured.evictions == 0
    assert true.hit_tokens == 0
    for blocks in (None, 500, 4_000):
        found = recorded.simulate(model, blocks)
        assert (found.hit_tokens, found.evictions) == (0, 0)


def test_in_a_slower_engine_rounds_stay_rounds(model: Path, tmp_path: Path) -> None:
    """With one request at a time and steps that take 50 times as long, a round takes longer than
    the time between two resets. Each reset waits for its round all the same."""
    true = in_rounds(model, tmp_path / "s")
    recorded = Recorded(true.session)
    recorded.step_time = type(recorded.step_time)(1.5)
    found = recorded.simulate(model, max_num_seqs=1)
    assert (found.hit_tokens, found.preemptions) == (0, 0)
    assert found.requests == PROMPTS * ROUNDS
    assert (found.span_sec or 0) > PROMPTS * ROUNDS * 4 * 1.5 - 10


def test_rounds_without_resets_find_all(model: Path, tmp_path: Path) -> None:
    true = in_rounds(model, tmp_path / "s", resets=False)
    assert true.hit_tokens == FOUND
    assert Recorded(true.session).simulate(model).hit_tokens == FOUND
    curve = fast.curve(read_workload(true.session), [999])
    assert {outcome.hit_tokens for outcome in curve.points[0].outcomes} == {FOUND}
    assert curve.ceiling.dropped_tokens == 0


def test_the_fast_engine_keeps_resets(model: Path, tmp_path: Path) -> None:
    curve = fast.curve(read_workload(in_rounds(model, tmp_path / "s").session), [500, 999, 4_000])
    for point in curve.points:
        assert {outcome.hit_tokens for outcome in point.outcomes} == {0}
        assert {outcome.evictions for outcome in point.outcomes} == {0}
    assert (curve.ceiling.hit_rate, curve.ceiling.dropped_tokens) == (0, FOUND)
    assert curve.ceiling.distinct_blocks == PROMPTS * FULL
    assert curve.at_measured is not None
    assert curve.at_measured.verdict is not None
    assert curve.at_measured.verdict.by == "resets"


@pytest.mark.parametrize("blocks", [SMALL, 800])
@pytest.mark.parametrize("every", [7, 60])
def test_resets_of_an_engine_at_work(model: Path, tmp_path: Path, blocks: int, every: int) -> None:
    """What runs is preempted, and computed again."""
    true = truth.run(
        model,
        tmp_path / "s",
        blocks,
        requests=hurried(),
        step_sec=truth.device,
        abort=at_work(every),
        **LIMITS,
    )
    found = Recorded(true.session).simulate(model)
    assert true.preemptions > 0
    # The oracle counts what resets dropped among its evictions.
    dropped = {"evictions"}
    assert {name: count for name, count in counts(found).items() if name not in dropped} == {
        name: count for name, count in counts(true).items() if name not in dropped
    }
    assert found.evictions == Recorded(true.session).measured.evictions
    modelled = fast.curve(read_workload(true.session), [blocks - 1], ["lru"])
    (outcome,) = modelled.points[0].outcomes
    assert abs((outcome.hit_rate or 0) - true.hit_rate) < 0.01


def test_evictions_on_request(model: Path, tmp_path: Path) -> None:
    """The second of a prompt's four full blocks goes each time before the prompt comes again. So
    one block is found, though all of the others are there."""
    make, prompt = RequestMaker(16), tokens(1, 65)
    requests = [(1_000.0 * number, make(f"r{number}", prompt, 1)) for number in range(5)]

    def evict(scheduler: Any, step: int) -> list[str]:
        pool = scheduler.kv_cache_manager.block_pool
        for request in scheduler.waiting:
            found = pool.get_cached_block(request.block_hashes[1], [0])
            while found:
                pool.evict_blocks({block.block_id for block in found})
                found = pool.get_cached_block(request.block_hashes[1], [0])
        return []

    true = truth.run(model, tmp_path / "s", 101, requests=requests, abort=evict)
    assert true.hit_tokens == 4 * 16
    recorded = Recorded(true.session)
    assert len(recorded.workload.drops) == 4
    assert recorded.measured.evictions == 0
    found = recorded.simulate(model)
    assert (found.hit_tokens, found.evictions) == (4 * 16, 0)
    assert recorded.simulate(model, 51).hit_tokens == 4 * 16
    curve = fast.curve(read_workload(true.session), [50, 100])
    for point in curve.points:
        assert {outcome.hit_tokens for outcome in point.outcomes} == {4 * 16}
    assert curve.ceiling.dropped_tokens == 4 * 3 * 16
    assert not np.any(recorded.workload.resized(32).drops.content >= 0)


@pytest.mark.parametrize("rule", [policies.Lfu, policies.Arc, policies.S3Fifo, policies.Sieve])
def test_a_reset_leaves_every_rule_an_empty_pool(rule: type[policies.Cache]) -> None:
    """After it, a rule does what it does at the beginning, whatever it had learnt."""
    draw = np.random.default_rng(7)
    half = [tuple(range(3 * kind, 3 * kind + 3)) for kind in draw.integers(0, 6, 60).tolist()]
    other = [tuple(100 + block for block in chain) for chain in half]
    alone, both = given_chains(half), given_chains([*half, *other])
    both = replace(both, epoch=np.repeat([0, 1], len(half)))
    for size in (5, 8, 11):
        (once,), (twice,) = (policies.found(each, [size], rule) for each in (alone, both))
        assert twice.tolist() == [*once.tolist(), *once.tolist()]
