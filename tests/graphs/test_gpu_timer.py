# SPDX-License-Identifier: Apache-2.0
"""Times on the GPU come from events, when those have passed: nothing waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profilemate.hooks.gpu import gpu_timer
from profilemate.hooks.gpu.gpu_timer import NOT_MEASURED, GpuTimer
from tests.graphs.recording import Recording
from tests.graphs.steps import Output, decode


class Gpu:
    """In place of ``torch.cuda``: a GPU that works off what was launched when it is asked to.

    Each event passes 0.5 ms after the one before. ``launched`` counts the events that were
    recorded, ``passed`` those that have passed; ``made`` those that there are.
    """

    def __init__(self) -> None:
        self.launched = self.passed = self.made = 0
        self.capturing = False
        gpu = self

        class Event:
            """A CUDA event. It has no ``synchronize``: whoever waits, fails."""

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                gpu.made += 1
                self.place: int | None = None

            def record(self) -> None:
                """It passes after all that was launched before."""
                assert not gpu.capturing
                gpu.launched += 1
                self.place = gpu.launched

            def query(self) -> bool:
                """Whether it has passed."""
                assert self.place is not None
                return self.place <= gpu.passed

            def elapsed_time(self, end: Event) -> float:
                """Milliseconds up to another."""
                assert self.query()
                assert end.query()
                assert self.place is not None
                assert end.place is not None
                return (end.place - self.place) / 2

        self.Event = Event

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capturing

    def catch_up(self) -> None:
        """Everything launched so far is done."""
        self.passed = self.launched


HALF_MS = 500_000


def interval(timer: GpuTimer) -> Any:
    """One that was begun and ended."""
    begun = timer.begin()
    assert begun is not None
    begun[1].record()
    return begun


def test_what_was_launched_first_is_reported_first_and_nothing_before_it_passed() -> None:
    gpu, reported = Gpu(), []
    timer = GpuTimer(gpu)
    timer.when_done([interval(timer)], lambda ns: reported.append(("first", ns)))
    timer.when_done([], lambda ns: reported.append(("without", ns)))
    timer.when_done([interval(timer), interval(timer)], lambda ns: reported.append(("two", ns)))
    assert reported == []
    gpu.passed = 2
    timer.when_done([], lambda ns: reported.append(("last", ns)))
    assert reported == [("first", HALF_MS), ("without", 0)]
    gpu.catch_up()
    timer.give_up()
    assert reported[2:] == [("two", 2 * HALF_MS), ("last", 0)]


def test_events_are_used_again_once_they_passed() -> None:
    gpu = Gpu()
    timer = GpuTimer(gpu)
    for _ in range(10):
        timer.when_done([interval(timer), interval(timer)], lambda _: None)
        gpu.catch_up()
    # Those of the first round come back when the second one asks.
    assert gpu.made == 8


def test_a_gpu_that_never_answers_costs_a_bounded_number_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_timer, "MAX_INTERVALS", 6)
    monkeypatch.setattr(gpu_timer, "MAX_WAITING", 3)
    gpu, reported = Gpu(), []
    timer = GpuTimer(gpu)
    for _ in range(3):
        timer.when_done([interval(timer), interval(timer)], reported.append)
    assert timer.begin() is None
    timer.when_done([], reported.append)
    assert reported == [NOT_MEASURED]
    # What was given up makes room for others.
    assert timer.begin() is not None
    timer.give_up()
    assert reported == [NOT_MEASURED] * 4


def test_nothing_is_timed_while_a_graph_is_captured() -> None:
    gpu = Gpu()
    gpu.capturing = True
    assert GpuTimer(gpu).begin() is None
    assert gpu.made == 0


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def runner(toys: Any, model: Path, cuda: Any, gpu: Gpu, tmp_path: Path) -> Iterator[Any]:
    """A recorded and timed one, and what records it."""
    recording = Recording(tmp_path / "worker0.journal", cuda.graph_class, gpu)
    runner = toys.Runner(toys.config(model), cuda)
    recording.watch(runner)
    runner.capture_model()
    yield SimpleNamespace(recording=recording, run=runner.execute_model, runner=runner)
    recording.recorder.close()


def test_executions_are_recorded_in_order_with_their_times(runner: Any, gpu: Gpu) -> None:
    assert gpu.launched == 0
    runner.runner.seen.clear()
    for step in (decode(1), Output([5]), Output([30]), decode(3)):
        runner.run(step)
    gpu.catch_up()
    runner.run(decode(2))
    found = runner.recording.end()
    assert found.executions[-5:] == runner.runner.seen
    assert [gpu_ns for _, gpu_ns in found.times[-5:]] == [HALF_MS, 3 * HALF_MS, None, HALF_MS, None]
    assert found.order == sorted(found.order)


def test_replays_outside_executions_are_timed_too(runner: Any, gpu: Gpu) -> None:
    (graph,) = [
        entry.cudagraph
        for batch, entry in runner.runner.model.concrete_cudagraph_entries.items()
        if batch.num_tokens == 1
    ]
    graph.replay()
    graph.replay()
    gpu.catch_up()
    found = runner.recording.end()
    assert [graphs for _, graphs in found.replays] == [2]
    assert gpu.launched == 4


def test_what_is_not_timed_whole_has_no_time(
    runner: Any, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_timer, "MAX_INTERVALS", 2)
    runner.run(Output([5]))
    gpu.catch_up()
    found = runner.recording.end()
    assert found.executions[-1].graphs == 3
    assert found.times[-1][1] is None


def test_events_that_fail_end_the_recording_and_not_the_replay(
    runner: Any, gpu: Gpu, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no such event")

    gpu.Event.record = fail  # type: ignore[method-assign]
    assert runner.run(decode(3)).tolist() == runner.runner.outputs(3)
    assert runner.run(decode(3)).tolist() == runner.runner.outputs(3)
    assert capfd.readouterr().err.count("(GPU timing: RuntimeError: no such event)") == 1
    assert set(runner.recording.end().status["lost"]) == {"graphs", "executions"}


def test_two_workers_of_one_process_share_their_events(
    toys: Any, model: Path, cuda: Any, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_timer, "MAX_INTERVALS", 4)
    first, second = (
        Recording(tmp_path / f"worker{rank}.journal", cuda.graph_class, gpu) for rank in (0, 1)
    )
    runner = toys.Runner(toys.config(model), cuda)
    second.watch(runner)
    runner.capture_model()
    for _ in range(6):
        runner.execute_model(decode(3))
        gpu.catch_up()
    runner.execute_model(Output([30]))
    first.end()
    found = second.end()
    assert [gpu_ns for _, gpu_ns in found.times[-7:]] == [HALF_MS] * 6 + [None]
