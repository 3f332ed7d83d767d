# SPDX-License-Identifier: Apache-2.0
"""The simulation against the truth: what vLLM's scheduler really did, counted by the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.whatif.clock import StepTime
from analysis.whatif.configuration import Choices, pools, recorded
from analysis.whatif.workload import read_workload
from profilemate.simulation.engine import Engine
from tests.support.scheduler import ANSWER, RequestMaker, tokens, trace_requests
from tests.whatif import truth
from tests.whatif.simulating import Recorded
from tests.whatif.truth import Truth

pytestmark = pytest.mark.usefixtures("hooks_on")

REQUESTS = 250
SMALL = 150
"""Blocks of a pool in which this many requests preempt each other."""


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """The trace's head, twenty times as fast, in a small pool."""
    folder = tmp_path_factory.mktemp("small") / "sessions"
    return truth.run(model, folder, SMALL, requests=hurried(), step_sec=truth.device, **LIMITS)


LIMITS = {"max_model_len": 2_048, "max_num_seqs": 16}


def hurried(
    block_size: int = 16, change: Callable[[Any], None] = lambda request: None
) -> list[tuple[float, Any]]:
    """The trace's short requests, twenty times as fast as they came."""
    short = trace_requests(RequestMaker(block_size), REQUESTS, max_model_len=1_200)
    found = [(at / 20, request) for at, request in short]
    for number, (at, request) in enumerate(found):
        # By which requests of one priority take turns.
        request.arrival_time = at + number / 1e6
        change(request)
    return found


def turned(request: Any) -> None:
    """Priorities of three kinds."""
    request.priority = int(request.request_id.split("-")[1]) * 7 % 3


@pytest.mark.parametrize(
    ("blocks", "arguments"),
    [
        pytest.param(SMALL, {}, id="preemptions"),
        pytest.param(SMALL, {"scheduling_policy": "priority"}, id="priority"),
        pytest.param(SMALL, {"max_num_batched_tokens": 128}, id="chunks"),
        pytest.param(SMALL, {"enable_prefix_caching": False}, id="caching off"),
        pytest.param(SMALL, {"scheduler_reserve_full_isl": False, "watermark": 0.05}, id="room"),
        pytest.param(800, {"block_size": 8, "max_num_seqs": 4}, id="queue"),
    ],
)
def test_as_recorded_it_does_the_same(
    model: Path, tmp_path: Path, blocks: int, arguments: dict[str, Any]
) -> None:
    requests = hurried(arguments.get("block_size", 16), turned)
    arguments = {**LIMITS, **arguments}
    true = truth.run(
        model, tmp_path / "s", blocks, requests=requests, step_sec=truth.device, **arguments
    )
    found = Recorded(true.session).simulate(model)
    assert counts(found) == counts(true)


def counts(found: Any) -> dict[str, int]:
    """What both the oracle and the simulation count."""
    names = ("hit_tokens", "query_tokens", "evictions", "preemptions", "steps")
    names += ("recomputed_tokens",)
    return {name: getattr(found, name) for name in names}


def test_what_the_cases_above_show(small: Truth) -> None:
    """Something is evicted, found and preempted; otherwise they would show nothing."""
    assert min(small.evictions, small.hit_tokens, small.preemptions) > 0


@pytest.mark.parametrize(
    ("blocks", "settings"),
    [
        pytest.param(600, {}, id="a larger pool"),
        pytest.param(120, {"block_size": 32}, id="larger blocks"),
        pytest.param(250, {"max_num_seqs": 3}, id="fewer requests at once"),
        pytest.param(250, {"max_num_batched_tokens": 256}, id="smaller steps"),
    ],
)
def test_elsewhere_it_does_what_vllm_would(
    small: Truth, model: Path, tmp_path: Path, blocks: int, settings: dict[str, int]
) -> None:
    requests = hurried(settings.get("block_size", 16))
    arguments = {**LIMITS, **settings}
    true = truth.run(
        model, tmp_path / "s", blocks, requests=requests, step_sec=truth.device, **arguments
    )
    found = Recorded(small.session).simulate(model, blocks, **settings)
    assert abs((found.hit_rate or 0) - true.hit_rate) <= 0.002
    assert abs((found.evictions or 0) - true.evictions) <= 0.01 * true.evictions
    assert true.evictions > 1_000 or blocks == 600


@pytest.mark.parametrize("is_async", [True, False], ids=["asynchronous", "pipeline"])
def test_batches_in_flight(model: Path, tmp_path: Path, is_async: bool) -> None:
    """Two steps are scheduled before the first one's results are in, as in an engine with
    asynchronous scheduling, or with two stages."""
    arguments: dict[str, Any] = {**LIMITS, "async_scheduling": is_async, "batches": 2}
    true, elsewhere = (
        truth.run(
            model,
            tmp_path / str(blocks),
            blocks,
            requests=hurried(),
            step_sec=truth.device,
            **arguments,
        )
        for blocks in (SMALL, 400)
    )
    # Only the driver knows that there are two stages.
    source = Recorded(true.session, batches=None if is_async else 2)
    assert (source.base.async_scheduling, source.base.batches) == (is_async, 2)
    for blocks, counted in ((SMALL, true), (400, elsewhere)):
        found = source.simulate(model, blocks)
        assert abs((found.hit_rate or 0) - counted.hit_rate) <= 0.002
        assert abs((found.evictions or 0) - counted.evictions) <= 0.01 * counted.evictions
        assert abs((found.steps or 0) - counted.steps) <= 0.02 * counted.steps


def test_smaller_blocks_are_known_by_prefixes(small: Truth, model: Path, tmp_path: Path) -> None:
    """Recorded in blocks of 64 tokens; prompts that part inside one share its beginning."""
    arguments = {**LIMITS, "block_size": 64}
    large = truth.run(
        model, tmp_path / "s", 150, requests=hurried(64), step_sec=truth.device, **arguments
    )
    source = Recorded(large.session)
    found = source.simulate(model, SMALL, block_size=16)
    assert abs((found.hit_rate or 0) - small.hit_rate) <= 0.002
    assert abs((found.evictions or 0) - small.evictions) <= 0.01 * small.evictions
    source.prefixes = None
    lower = source.simulate(model, SMALL, block_size=16)
    assert (lower.hit_rate or 0) < small.hit_rate - 0.01


def test_an_answer_is_found_by_the_next_turn(model: Path, tmp_path: Path) -> None:
    """A turn of 40 tokens, answered by 25, and the next turn, which repeats these and asks on.

    Of the first 65 tokens the last was never computed. At a block size of 16, 32 and 64 the first
    64 are whole blocks, which the next turn finds; at 128 no block is full.
    """
    make = RequestMaker(16)
    first = tokens(1, 40)
    answer = [ANSWER] * 25
    second = [*first, *answer, *tokens(2, 30)]
    requests = [(0.0, make("one", first, 25)), (9_000.0, make("two", second, 5))]
    recorded_session = Recorded(truth.run(model, tmp_path / "s", 50, requests=requests).session)
    for block_size, hit in ((16, 64), (32, 64), (64, 64), (128, 0)):
        found = recorded_session.simulate(model, 50, block_size=block_size)
        assert (found.query_tokens, found.hit_tokens) == (40 + 95, hit), block_size


def test_engines_are_simulated_apart_and_added(small: Truth, model: Path) -> None:
    one = Recorded(small.session)
    half = np.arange(len(one.workload)) % 2
    both = replace(one.workload, engine=half)
    parts = [
        Engine(
            model,
            one.base,
            both.of_engine(rank),
            one.step_time,
            numbers=np.flatnonzero(half == rank).tolist(),
        ).run()
        for rank in both.engines
    ]
    total = parts[0] + parts[1]
    assert total.outcome(one.base).requests == len(one.workload)
    assert total.evictions == parts[0].evictions + parts[1].evictions > 0
    assert total.outcome(one.base).queue_mean_sec == pytest.approx(
        (sum(parts[0].waits) + sum(parts[1].waits)) / len(one.workload)
    )


def test_what_can_never_fit_is_counted_and_left_out(small: Truth, model: Path) -> None:
    source = Recorded(small.session)
    blocks = 30
    needed = source.workload.input_tokens + source.workload.output_tokens - 1
    too_long = int((-(-needed // 16) > blocks - 1).sum())
    found = source.simulate(model, blocks)
    assert found.failed_requests == too_long > 0
    assert found.requests == len(source.workload) - too_long


def test_a_prompt_that_no_step_can_take_is_given_up(model: Path, tmp_path: Path) -> None:
    """Without chunks a prompt must fit into a step; a watermark can keep one out for ever."""
    requests = [(0.0, RequestMaker(16)("one", tokens(1, 300), 2))]
    source = Recorded(truth.run(model, tmp_path / "s", 50, requests=requests, **LIMITS).session)
    engine = Engine(model, source.base, source.workload, source.step_time)
    # vLLM refuses such a configuration, so the scheduler gets it later.
    engine._scheduler.scheduler_config.enable_chunked_prefill = False
    engine._scheduler.max_num_scheduled_tokens = 200
    outcome = engine.run().outcome(source.base)
    assert (outcome.failed_requests, outcome.requests) == (1, 0)


def test_it_is_given_up_after_others_ran(model: Path, tmp_path: Path) -> None:
    """With asynchronous scheduling empty steps follow the last one that computed anything."""
    make = RequestMaker(16)
    requests = [(0.0, make("runs", tokens(1, 30), 3)), (1.0, make("never", tokens(2, 300), 2))]
    two = {"async_scheduling": True, "batches": 2}
    source = Recorded(
        truth.run(model, tmp_path / "s", 50, requests=requests, **two, **LIMITS).session
    )
    engine = Engine(model, source.base, source.workload, source.step_time)
    engine._scheduler.scheduler_config.enable_chunked_prefill = False
    engine._scheduler.max_num_scheduled_tokens = 200
    outcome = engine.run().outcome(source.base)
    assert (outcome.failed_requests, outcome.requests) == (1, 1)


def test_an_aborted_request_ends_where_it_ended(model: Path, tmp_path: Path) -> None:
    """One that had ten tokens of its answer when it was aborted has them again, and no more; one
    that never ran leaves when it left."""
    make = RequestMaker(16)
    long = [(0.0, make(f"long {n}", tokens(n, 100), 400)) for n in range(2)]
    waits = [(40.0, make("waits", tokens(9, 100), 5))]

    def gone(scheduler: Any, step: int) -> list[str]:
        if step == 20:
            return ["long 0"]
        return ["waits"] if step == 12 else []

    true = truth.run(
        model, tmp_path / "s", 100, requests=[*long, *waits], max_num_seqs=2, abort=gone
    )
    source = Recorded(true.session)
    assert source.workload.aborted.sum() == 2
    found = source.simulate(model)
    assert counts(found) == counts(true)
    assert found.requests == 2


def test_warm_up_is_simulated_and_not_counted(small: Truth, model: Path) -> None:
    """The counts are those of the session's tables from then on."""
    whole, later = Recorded(small.session), Recorded(small.session, after_sec=2.0)
    found, measured = later.simulate(model), later.measured
    names = ("requests", "query_tokens", "hit_tokens", "evictions", "preemptions", "steps")
    assert [getattr(found, name) for name in names] == [getattr(measured, name) for name in names]
    assert 0 < found.requests < whole.measured.requests
    assert 0 < (found.evictions or 0) < (whole.measured.evictions or 0)


def test_a_trace_runs_by_its_own_arrivals_and_contents(model: Path, tmp_path: Path) -> None:
    """Three blocks of 64 tokens, found by the second request at any block size that divides them;
    the third has the same prompt to its end inside a block. No other request has its answer."""
    trace = tmp_path / "trace.jsonl"
    came = ((0, 192, [1, 2, 3]), (60_000, 224, [1, 2, 3, 4]), (120_000, 224, [1, 2, 3, 4]))
    names = ("timestamp", "input_length", "hash_ids")
    rows = [dict(zip(names, values, strict=True)) for values in came]
    trace.write_text(
        "".join(json.dumps(row | {"output_length": 64, "block_size": 64}) + "\n" for row in rows)
    )
    workload = read_workload(trace)
    base, notes = recorded(workload, Choices(blocks=pools("200"), block_size=(16,)))
    assert (base.gpu_blocks, base.block_size, notes) == (200, 16, ())
    found = Engine(model, base, workload, StepTime(0.01)).run().outcome(base)
    # The last token of a prompt is always computed, so of 224 tokens in blocks of 16 all but one
    # block are found.
    assert found.hit_tokens == 192 + 208
    # The first is admitted as it comes; 64 steps of 10 ms for each.
    assert (found.steps, found.queue_mean_sec) == (3 * 64, 0)
    assert found.span_sec == pytest.approx(120 + 0.64)
