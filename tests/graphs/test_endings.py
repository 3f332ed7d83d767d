# SPDX-License-Identifier: Apache-2.0
"""However recording ends, vLLM goes on without it, and its methods are its own again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from profilemate.hooks.gpu import executions, graph_sources, graphs
from profilemate.record import journal_writer
from tests.graphs.recording import Execution, Recording, read
from tests.graphs.steps import Output, decode

HOOKED = ("capture_begin", "capture_end", "replay")


@pytest.fixture
def runner(toys: Any, model: Path, cuda: Any, recording: Recording) -> Any:
    runner = toys.Runner(toys.config(model), cuda)
    recording.watch(runner)
    runner.capture_model()
    return runner


def assert_is_vllms_own(runner: Any) -> None:
    """Nothing is hooked, and everything works."""
    for name in HOOKED:
        assert not hasattr(getattr(runner.cuda.graph_class, name), "__wrapped__")
    assert_runs(runner, {"profile_cudagraph_memory", "capture_model"})


def assert_runs(runner: Any, also: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """No execution is watched, nor what else is named, and everything works."""
    names = {"execute_model", "_dummy_run", "_determine_batch_execution_and_padding"}
    assert not vars(runner).keys() & (names | also)
    for step in (decode(3), Output([5]), Output([30])):
        output = runner.execute_model(step)
        assert output is not None
        assert output.tolist() == runner.outputs(step.total_num_scheduled_tokens)


def test_a_full_disk(
    runner: Any,
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def write(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    recording.recorder.flush()
    before = len(read(recording.journal).executions)
    steps = [decode(3), Output([5]), Output([30])]
    with monkeypatch.context() as patch:
        patch.setattr(journal_writer.os, "write", write)
        for step in steps:
            output = runner.execute_model(step)
            assert output is not None
            assert output.tolist() == runner.outputs(step.total_num_scheduled_tokens)
            recording.recorder.flush()
        # Nothing is kept of what cannot be written.
        assert not recording.recorder.waiting
        assert recording.recorder.dropped >= len(steps)
        recording.recorder.close()
    said = capfd.readouterr().err
    assert said.count("recording stopped, the journal cannot be written") == 1
    # The last frame may have made room for saying so.
    assert len(read(recording.journal).executions) <= before
    assert_is_vllms_own(runner)


@pytest.mark.parametrize("name", ["begin", "end"])
@pytest.mark.parametrize("where", ["execute_model", "_dummy_run"])
def test_executions_that_cannot_be_recorded(
    runner: Any,
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    where: str,
) -> None:
    """The timeline ends; captures and replays go on being counted."""
    run = runner.execute_model if where == "execute_model" else runner._dummy_run
    with monkeypatch.context() as patch:
        patch.setattr(executions.Executions, name, fail)
        assert run(decode(3) if where == "execute_model" else 3).tolist() == runner.outputs(3)
    assert_runs(runner)
    # Nothing waits for the recording's end, which may never come.
    recording.recorder.flush()
    found = read(recording.journal)
    assert sum(graphs for _, graphs in found.replays) == runner.cuda.count("replay")
    runner.capture_model()
    captured, replayed = runner.cuda.count("end"), runner.cuda.count("replay")
    said = capfd.readouterr().err
    assert said.count("profilemate") == 1
    assert f"no longer recorded: cuda_graph_timeline.csv ({where}: RuntimeError: lost)" in said
    found = recording.end()
    assert set(found.status["lost"]) == {"executions"}
    assert len(found.captures) == captured
    assert sum(graphs for _, graphs in found.replays) == replayed


def fail(*_: Any) -> None:
    """A hook of ours that does not work."""
    raise RuntimeError("lost")


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (graph_sources, "current", "capture_begin"),
        (graphs.Graphs, "end", "capture_end"),
    ],
)
def test_graphs_that_cannot_be_recorded(
    runner: Any,
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    owner: Any,
    name: str,
    where: str,
) -> None:
    """What hangs on CUDA graphs ends, and one line says so."""
    import torch

    monkeypatch.setattr(owner, name, fail)
    for _ in range(2):
        graph = runner.cuda.graph_class()
        with torch.cuda.graph(graph):
            torch.zeros(1)
        graph.replay()
    assert_is_vllms_own(runner)
    said = capfd.readouterr().err
    assert said.count("profilemate") == 1
    assert f"cuda_graph_timeline.csv ({where}: RuntimeError: lost)" in said
    lost = recording.end().status["lost"]
    assert set(lost) == {"graphs", "executions"}
    assert {loss["reason"] for loss in lost.values()} == {f"{where}: RuntimeError: lost"}


def test_a_fork(runner: Any, recording: Recording) -> None:
    """A child has what vLLM has made, and leaves its parent's journal alone."""
    child = os.fork()
    if not child:
        status = 1
        try:
            assert_is_vllms_own(runner)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    before = len(runner.seen)
    runner.execute_model(decode(3))
    found = recording.end()
    assert found.executions == runner.seen
    assert found.executions[before:] == [Execution(("FULL", 4, 4, 1, 0), 3, 1)]


def test_two_recordings_that_end_one_by_one(
    toys: Any, model: Path, cuda: Any, recording: Recording, tmp_path: Path
) -> None:
    first, second = (toys.Runner(toys.config(model), cuda) for _ in range(2))
    recording.watch(first)
    first.capture_model()
    other = Recording(tmp_path / "worker1.journal", cuda.graph_class)
    other.watch(second)
    second.capture_model()
    first.execute_model(decode(3))
    second.execute_model(decode(2))
    assert recording.end().executions == first.seen
    second.execute_model(Output([5]))
    first.execute_model(Output([5]))
    found = other.end()
    assert found.executions == second.seen
    assert not found.replays
    assert_is_vllms_own(first)
    assert_is_vllms_own(second)


def test_another_hook_on_the_same_methods_stays(
    toys: Any, model: Path, cuda: Any, recording: Recording
) -> None:
    """Another tool wraps what ours wrapped: it is not ours to take away."""
    runner = toys.Runner(toys.config(model), cuda)
    recording.watch(runner)
    calls: list[str] = []
    inner = {name: getattr(cuda.graph_class, name) for name in HOOKED}
    ours = runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        calls.append("execute_model")
        return ours(*args, **kwargs)

    def replay(graph: Any) -> None:
        calls.append("replay")
        inner["replay"](graph)

    runner.execute_model = execute_model  # type: ignore[method-assign]
    cuda.graph_class.replay = replay
    runner.capture_model()
    runner.execute_model(decode(3))
    assert recording.end().executions == runner.seen
    calls.clear()
    assert runner.execute_model(decode(3)).tolist() == runner.outputs(3)
    assert calls == ["execute_model", "replay"]
    assert cuda.graph_class.replay is replay
