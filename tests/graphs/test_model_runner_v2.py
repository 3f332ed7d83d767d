# SPDX-License-Identifier: Apache-2.0
"""vLLM's ModelCudaGraphManager, run as its second model runner runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.graphs.recording import Entry, Execution, Recording
from tests.graphs.steps import SIZES, Output, decode

FULL = [("FULL", size, size, 1, 0) for size in SIZES if size <= 8]
PIECEWISE = [("PIECEWISE", size, None, 0, 0) for size in SIZES]


@pytest.fixture(params=[False, True], ids=["compiled", "breakable"])
def runner(
    request: Any,
    toys: Any,
    model: Path,
    cuda: Any,
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A recorded one: with a wrapper for each piece, or with breakable graphs."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(request.param)))
    from vllm.v1.worker.gpu import cudagraph_utils

    from tests.graphs.toys_v2 import RunnerV2

    monkeypatch.setattr(cudagraph_utils, "has_compiled_submodule", lambda _: True)
    runner = RunnerV2(toys.config(model), cuda, breakable=request.param)
    recording.watch(runner)

    def forget(_: Any) -> None:
        runner.initialize_graphs()

    monkeypatch.setattr(cudagraph_utils, "_init_minimal_kv_cache_for_profiling", forget)
    monkeypatch.setattr(cudagraph_utils, "_teardown_profiling_state", forget)
    return runner


def test_start_up_and_serving(runner: Any, cuda: Any, recording: Recording) -> None:
    runner._dummy_run(20, is_profile=True)
    runner.profile_cudagraph_memory()
    trials = cuda.count("end")
    taken = runner.capture_model()
    for step in (decode(1), decode(3), Output([5]), Output([30]), Output([2, 1, 4]), decode(8)):
        output = runner.execute_model(step)
        assert output.tolist() == runner.outputs(step.total_num_scheduled_tokens)
    runner._dummy_run(2)
    found = recording.end()

    pieces = "BreakableCUDAGraphWrapper" if runner.breakable else "CUDAGraphWrapper"
    profiled = [
        *[Entry(batch, pieces, "profiling") for batch in PIECEWISE[::-1]],
        *[Entry(batch, "CudaGraphManager", "profiling") for batch in FULL[:-3:-1]],
    ]
    captured = [
        *[Entry(batch, pieces) for batch in PIECEWISE[::-1]],
        *[Entry(batch, "CudaGraphManager") for batch in FULL[::-1]],
    ]
    assert list(found.entries.values()) == [*profiled, *captured]
    # A breakable graph ends with what follows its last attention, even if that is nothing.
    graphs = runner.pieces + 1 if runner.breakable else runner.pieces
    for number, entry in found.entries.items():
        assert found.graphs_of(number) == (graphs if entry.batch[0] == "PIECEWISE" else 1)
    assert len(found.captures) == cuda.count("end")
    assert sum(kib for _, kib in found.captures[trials:]) * 1024 == taken

    assert found.executions == runner.seen
    assert found.executions == [
        Execution(("NONE", 20, None, 0, 0), 20, 0, dummy=1),
        Execution(FULL[0], 1, 1),
        Execution(FULL[2], 3, 1),
        Execution(PIECEWISE[3], 5, graphs),
        Execution(("NONE", 30, None, 0, 0), 30, 0),
        Execution(PIECEWISE[3], 7, graphs),
        Execution(FULL[3], 8, 1),
        Execution(FULL[1], 2, 1, dummy=1),
    ]
    assert not found.replays


def test_released_graphs_are_captured_anew_as_new_entries(
    runner: Any, recording: Recording
) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    for _ in range(2):
        runner.capture_model()
        runner.execute_model(Output([5]))
        runner.execute_model(decode(3))
        runner.cudagraph_manager.release_graphs()
        CUDAGraphWrapper.clear_all_graphs()
    found = recording.end()
    each = len(FULL) + len(PIECEWISE)
    assert len(found.entries) == 2 * each
    first, second = found.replayed_entries[:2], found.replayed_entries[2:]
    assert [number + each for number in first] == second
    assert [found.entries[number].batch for number in first] == [PIECEWISE[3], FULL[2]]
    assert found.executions == runner.seen


def test_a_step_without_tokens_is_no_execution(runner: Any, recording: Recording) -> None:
    runner.capture_model()
    runner.execute_model(decode(0))
    runner.execute_model(decode(2))
    assert recording.end().executions == runner.seen == [Execution(FULL[1], 2, 1)]


def test_the_function_that_dispatches_is_put_back(runner: Any, recording: Recording) -> None:
    from vllm.v1.worker.gpu import dp_utils

    from tests.graphs import toys_v2

    assert toys_v2.dispatch_cg_and_sync_dp is not dp_utils.dispatch_cg_and_sync_dp
    recording.end()
    assert toys_v2.dispatch_cg_and_sync_dp is dp_utils.dispatch_cg_and_sync_dp
    assert not {"execute_model", "_dummy_run", "profile_cudagraph_memory"} & vars(runner).keys()
