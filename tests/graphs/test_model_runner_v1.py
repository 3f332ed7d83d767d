# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDAGraphWrapper and CudagraphDispatcher, run as its first model runner runs them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.graphs.recording import Execution, Recording
from tests.graphs.steps import SIZES, Output, decode

PIECEWISE_8 = ("PIECEWISE", 8, None, 0, 0)
FULL_4 = ("FULL", 4, 4, 1, 0)


@pytest.fixture
def runner(toys: Any, model: Path, cuda: Any, recording: Recording) -> Any:
    """A recorded one, whose model has three pieces."""
    runner = toys.Runner(toys.config(model), cuda)
    recording.watch(runner)
    return runner


@pytest.fixture
def started(runner: Any) -> Any:
    """One with its graphs captured; what it executed before is not in ``seen``."""
    runner.capture_model()
    runner.seen.clear()
    return runner


def served(recording: Recording, runner: Any) -> list[Execution]:
    """The executions that are recorded since the runner started."""
    return recording.end().executions[-len(runner.seen) :]


def test_start_up_and_serving(runner: Any, cuda: Any, recording: Recording) -> None:
    runner.profile_cudagraph_memory()
    trials = cuda.count("end")
    taken = runner.capture_model()
    began = len(runner.seen)
    steps = [decode(1), decode(3), Output([5]), Output([30]), Output([2, 1, 4]), decode(8)]
    for step in steps:
        output = runner.execute_model(scheduler_output=step)
        assert output.tolist() == runner.outputs(step.total_num_scheduled_tokens)
    found = recording.end()

    piecewise = [("PIECEWISE", size, None, 0, 0) for size in SIZES]
    full = [("FULL", size, size, 1, 0) for size in SIZES if size <= 8]
    wanted = [*piecewise[::-1], *full[::-1]]
    entries = list(found.entries.values())
    assert [entry.batch for entry in entries if entry.kind == "capture"] == wanted
    assert [entry.batch for entry in entries if entry.kind == "profiling"] == [
        *wanted[:2],
        *full[::-1][:2],
    ]
    assert {(entry.source, entry.part) for entry in entries} == {("CUDAGraphWrapper", "model")}
    for number, entry in found.entries.items():
        assert found.graphs_of(number) == (3 if entry.batch[0] == "PIECEWISE" else 1)
    assert len(found.captures) == cuda.count("end")
    kinds = [found.entries[number].kind for number, _ in found.captures]
    assert kinds == ["profiling"] * trials + ["capture"] * (len(kinds) - trials)
    assert sum(kib for _, kib in found.captures[trials:]) * 1024 == taken

    assert found.executions == runner.seen
    assert found.executions[began:] == [
        Execution(("FULL", 1, 1, 1, 0), 1, 1),
        Execution(FULL_4, 3, 1),
        Execution(PIECEWISE_8, 5, 3),
        Execution(("NONE", 30, None, 0, 0), 30, 0),
        Execution(PIECEWISE_8, 7, 3),
        Execution(("FULL", 8, 8, 1, 0), 8, 1),
    ]
    assert not found.replays
    for execution, (launch, gpu) in zip(found.executions, found.times, strict=True):
        assert bool(launch) == bool(execution.graphs)
        assert gpu is None


def test_a_shape_captured_while_serving_is_captured_first_and_replayed_then(
    runner: Any, cuda: Any, recording: Recording
) -> None:
    for _ in range(3):
        output = runner.execute_model(Output([5]))
        assert output.tolist() == runner.outputs(5)
    found = recording.end()
    assert (cuda.count("end"), cuda.count("replay")) == (3, 6)
    assert [entry.batch for entry in found.entries.values()] == [PIECEWISE_8]
    assert found.graphs_of(1) == 3
    assert found.executions == [Execution(PIECEWISE_8, 5, graphs) for graphs in (0, 3, 3)]


def test_cleared_graphs_are_captured_anew_as_new_entries(runner: Any, recording: Recording) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    for _ in range(2):
        runner.execute_model(Output([5]))
        runner.execute_model(Output([5]))
        CUDAGraphWrapper.clear_all_graphs()
    found = recording.end()
    assert [entry.batch for entry in found.entries.values()] == [PIECEWISE_8] * 2
    assert [found.graphs_of(number) for number in (1, 2)] == [3, 3]
    assert found.replayed_entries == [0, 1, 0, 2]
    assert found.executions == runner.seen


def test_pieces_captured_anew_while_their_old_context_is_alive_are_a_new_entry(
    runner: Any, recording: Recording
) -> None:
    import torch
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import get_forward_context

    contexts = []

    def forward(x: Any) -> Any:
        context = get_forward_context()
        # What makes contexts that are compared by value fail: a tensor has no truth.
        context.attn_metadata = {"layer": torch.zeros(2)}
        contexts.append(context)
        return whole(x)

    whole, runner.model.runnable = runner.model.runnable, forward
    for _ in range(2):
        runner.execute_model(Output([5]))
        CUDAGraphWrapper.clear_all_graphs()
    found = recording.end()
    assert [found.graphs_of(number) for number in found.entries] == [3, 3]
    assert found.executions == runner.seen


def test_an_exception_of_the_model_passes_and_recording_goes_on(
    started: Any, recording: Recording
) -> None:
    error = RuntimeError("out of something")
    started.fail_with = error
    with pytest.raises(RuntimeError) as raised:
        started.execute_model(decode(3))
    assert raised.value is error
    started.fail_with = None
    started.execute_model(decode(3))
    found = recording.end()
    # It had been dispatched, and nothing was replayed.
    assert found.executions[-2] == Execution(("NONE", 4, None, 0, 0), 3, 0)
    assert found.executions[-1:] == started.seen == [Execution(FULL_4, 3, 1)]


def test_an_exception_before_anything_is_dispatched_is_no_execution(
    started: Any, recording: Recording
) -> None:
    with pytest.raises(ZeroDivisionError):
        started.execute_model(_Odd([7]))
    started.execute_model(decode(3))
    found = recording.end()
    assert found.executions[-1:] == started.seen
    assert found.executions[-2].dummy


class _Odd(Output):
    """A scheduler's output whose tokens cannot be read one by one."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return 7

    def __getattribute__(self, name: str) -> Any:
        if name == "tokens":
            raise ZeroDivisionError
        return super().__getattribute__(name)


def test_an_exception_while_capturing_passes_and_recording_goes_on(
    runner: Any, recording: Recording
) -> None:
    whole = runner.model.runnable
    error = RuntimeError("not while capturing")

    def forward(x: Any) -> Any:
        raise error

    runner.model.runnable = forward
    with pytest.raises(RuntimeError) as raised:
        runner.execute_model(decode(3))
    assert raised.value is error
    runner.model.runnable = whole
    for _ in range(2):
        assert runner.execute_model(decode(3)).tolist() == runner.outputs(3)
    found = recording.end()
    assert found.executions[-2:] == runner.seen
    # What was begun and given up is an entry that is never replayed.
    assert [entry.batch for entry in found.entries.values()] == [FULL_4] * 2
    assert found.replayed_entries[-2:] == [0, 2]


def test_an_exception_of_a_replay_passes_and_recording_goes_on(
    started: Any, recording: Recording
) -> None:
    (graph,) = [
        entry.cudagraph
        for entry in started.model.concrete_cudagraph_entries.values()
        if entry.batch_descriptor.num_tokens == 4
    ]
    operations, graph._operations = graph._operations, None
    with pytest.raises(RuntimeError, match="nothing was captured"):
        started.execute_model(decode(3))
    graph._operations = operations
    started.execute_model(decode(3))
    assert served(recording, started) == [Execution(FULL_4, 3, 1)]


def test_a_batch_dispatched_to_a_graph_and_run_without_is_eager(
    started: Any, recording: Recording
) -> None:
    started.run_eagerly = True
    started.execute_model(decode(3))
    assert served(recording, started) == [Execution(("NONE", 4, None, 0, 0), 3, 0)]


def test_a_step_without_tokens_is_no_execution(started: Any, recording: Recording) -> None:
    started.execute_model(decode(0))
    started.execute_model(decode(1))
    assert served(recording, started) == [Execution(("FULL", 1, 1, 1, 0), 1, 1)]
    assert recording.end().executions[-2].dummy


def test_a_dummy_inside_a_step_makes_it_one(
    toys: Any, model: Path, cuda: Any, recording: Recording
) -> None:
    runner = toys.IdleRunner(toys.config(model), cuda)
    recording.watch(runner)
    runner.capture_model()
    runner.seen.clear()
    runner.execute_model(decode(0))
    runner.execute_model(decode(2))
    assert served(recording, runner) == [
        Execution(("PIECEWISE", 1, None, 0, 0), 1, 3, dummy=1),
        Execution(("FULL", 2, 2, 1, 0), 2, 1),
    ]


def test_eager_is_recorded_as_such(toys: Any, model: Path, cuda: Any, recording: Recording) -> None:
    runner = toys.Runner(toys.config(model, "NONE", enforce_eager=True), cuda)
    recording.watch(runner)
    assert runner.capture_model() == 0
    runner.execute_model(decode(3))
    runner.execute_model(Output([9]))
    found = recording.end()
    assert (found.entries, found.captures) == ({}, [])
    assert found.executions == runner.seen
    assert [execution.batch for execution in found.executions] == [
        ("NONE", 3, None, 0, 0),
        ("NONE", 9, None, 0, 0),
    ]


def test_methods_look_as_before_and_are_put_back(
    toys: Any, model: Path, cuda: Any, recording: Recording
) -> None:
    runner = toys.Runner(toys.config(model), cuda)
    untouched = toys.Runner(toys.config(model), cuda)
    recording.watch(runner)
    owners = [
        (runner, untouched, ("execute_model", "_dummy_run", "profile_cudagraph_memory")),
        (runner, untouched, ("_determine_batch_execution_and_padding",)),
        (
            cuda.graph_class,
            type(cuda)().graph_class,
            ("capture_begin", "capture_end", "replay"),
        ),
    ]
    for hooked, plain, names in owners:
        for name in names:
            ours, own = getattr(hooked, name), getattr(plain, name)
            assert ours is not own
            assert inspect.signature(ours) == inspect.signature(own)
            assert (ours.__name__, ours.__doc__) == (name, own.__doc__)
    recording.end()
    assert vars(runner).keys() == vars(untouched).keys()
    for name in ("capture_begin", "capture_end", "replay"):
        assert not hasattr(getattr(cuda.graph_class, name), "__wrapped__")
    assert runner.execute_model(decode(3)).tolist() == runner.outputs(3)
