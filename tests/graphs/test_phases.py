# SPDX-License-Identifier: Apache-2.0
"""How long steps take on the GPU: events around what a runner does for requests, and nothing else.

The worker and its runner are toys with the methods of vLLM's. The GPU is a stand-in whose every
event passes half a millisecond after the one before, when it is asked to catch up.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profilemate.format.events import More
from profilemate.hooks.gpu import gpu_timer, phases
from profilemate.hooks.gpu.phases import Phases
from tests.graphs.recording import Recording, more
from tests.graphs.test_gpu_timer import HALF_MS, Gpu
from tests.graphs.test_tables import rows
from tests.kv.recording import make_tables, only_session

STEP_NS, WITH_ENCODER_NS = 2 * HALF_MS, 4 * HALF_MS
"""Two intervals: ``execute_model`` and ``sample_tokens``. With the encoder the first one has two
events more in it."""


def step(*, new: dict[str, int] | None = None, decodes: int = 0, items: int = 0) -> Any:
    """A scheduler's output: prompts by request, and requests that decode."""
    new = new or {}
    tokens = {**new, **{f"old {number}": 1 for number in range(decodes)}}
    return SimpleNamespace(
        tokens=[*tokens.values()],
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids=set(),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[1] * count, num_computed_tokens=0)
            for name, count in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
        ),
        scheduled_encoder_inputs={"a": list(range(items))} if items else {},
    )


class Toy:
    """A worker and its runner in one. ``ran`` lists what was called, in order."""

    def __init__(self) -> None:
        self.model_runner = self
        self.ran: list[str] = []
        self.fail_with: BaseException | None = None
        self.result: Any = None
        self.runs_a_dummy = False

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Run a step; sampling follows where it returns None."""
        self.ran.append("model")
        if self.runs_a_dummy:
            self._dummy_run(1)
        self.encode(scheduler_output)
        if self.fail_with is not None:
            raise self.fail_with
        return self.result

    def sample_tokens(self, grammar_output: Any) -> str:
        """Sample."""
        self.ran.append("sample")
        return "output"

    def _dummy_run(self, num_tokens: int) -> None:
        self.ran.append("dummy")

    def compile_or_warm_up_model(self) -> None:
        """Warm up with requests that nobody made."""
        self._dummy_run(8)
        self.execute_model(step(new={"nobody": 5}))
        self.sample_tokens(None)

    def encode(self, scheduler_output: Any) -> None:
        """Run the encoder."""


class ToyV1(Toy):
    """As model runner V1."""

    def encode(self, scheduler_output: Any) -> None:
        """Run the encoder."""
        self._execute_mm_encoder(scheduler_output)

    def _execute_mm_encoder(self, scheduler_output: Any) -> None:
        self.ran.append("encoder")


class ToyV2(Toy):
    """As model runner V2, which has its encoder once the model is loaded."""

    model_state: Any = None

    def load_model(self) -> None:
        """Load it."""
        self.model_state = SimpleNamespace(encoder_runner=ToyEncoder(self.ran))
        # It profiles itself.
        self.model_state.encoder_runner.execute_mm_encoder([])

    def encode(self, scheduler_output: Any) -> None:
        """Run the encoder."""
        if scheduler_output.scheduled_encoder_inputs:
            self.model_state.encoder_runner.execute_mm_encoder([])


class ToyEncoder:
    """Of model runner V2."""

    def __init__(self, ran: list[str]) -> None:
        self.ran = ran

    def execute_mm_encoder(self, mm_kwargs: Any) -> list[Any]:
        """Run it."""
        self.ran.append("encoder")
        return []


class Recorded:
    """A toy that is recorded, on a GPU."""

    def __init__(self, worker: Toy, gpu: Gpu, recording: Recording) -> None:
        self.worker, self.gpu, self.recording = worker, gpu, recording
        self.phases: Phases = phases.watch(worker, recording.graphs, gpu)

    def run(self, output: Any) -> None:
        """Run a step, and have the GPU do it."""
        if self.worker.execute_model(output) is None:
            self.worker.sample_tokens(None)
        self.gpu.catch_up()

    def end(self) -> list[list[Any]]:
        """The values of each step that was recorded."""
        if self.recording.recorder.active and not self.phases.part.lost:
            self.phases.close()
        self.recording.recorder.close()
        return more(self.recording.journal, More.PHASES)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture(params=[ToyV1, ToyV2])
def recorded(
    request: pytest.FixtureRequest, cuda: Any, gpu: Gpu, tmp_path: Path
) -> Iterator[Recorded]:
    recording = Recording(tmp_path / "worker0.journal", cuda.graph_class)
    found = Recorded(request.param(), gpu, recording)
    if isinstance(found.worker, ToyV2):
        found.worker.load_model()
    yield found
    recording.recorder.close()


def test_each_step_by_phase(recorded: Recorded) -> None:
    recorded.run(step(new={"a": 5, "b": 7}))
    recorded.run(step(new={"c": 3}, decodes=2))
    recorded.run(step(decodes=4))
    assert recorded.end() == [
        [12, 0, 2, 0, STEP_NS, 0, 0],
        [3, 2, 1, 2, STEP_NS, 0, 0],
        [0, 4, 0, 4, STEP_NS, 0, 0],
    ]


def test_the_encoder_is_part_of_a_step(recorded: Recorded) -> None:
    recorded.run(step(new={"a": 5}, items=2))
    recorded.run(step(decodes=1))
    assert recorded.end() == [
        [5, 0, 1, 0, WITH_ENCODER_NS, 2, HALF_MS],
        [0, 1, 0, 1, STEP_NS, 0, 0],
    ]


def test_nothing_waits_for_the_gpu(recorded: Recorded, gpu: Gpu) -> None:
    """The stand-in's events cannot be waited for. Steps are told in order, once they are known."""
    for count in (1, 2):
        recorded.worker.execute_model(step(decodes=count))
        recorded.worker.sample_tokens(None)
    recorded.recording.recorder.step_ended()
    assert gpu.passed == 0
    recorded.run(step(decodes=3))
    assert [values[1] for values in recorded.end()] == [1, 2, 3]


def test_where_sampling_is_part_of_the_model(recorded: Recorded) -> None:
    recorded.worker.result = "output"
    recorded.run(step(decodes=2))
    recorded.run(step(decodes=1))
    assert [values[4] for values in recorded.end()] == [HALF_MS, HALF_MS]


def test_a_rank_that_never_samples(recorded: Recorded, gpu: Gpu) -> None:
    """The next step shows that the last one is over."""
    for count in (2, 1):
        recorded.worker.execute_model(step(decodes=count))
        gpu.catch_up()
    assert [values[1::3] for values in recorded.end()] == [[2, HALF_MS], [1, HALF_MS]]


def test_dummies_and_warm_up_are_no_steps(recorded: Recorded, gpu: Gpu) -> None:
    recorded.worker.compile_or_warm_up_model()
    recorded.worker._dummy_run(4)
    recorded.worker.sample_tokens(None)
    launched = gpu.launched
    recorded.worker.runs_a_dummy = True
    recorded.run(step(decodes=1))
    recorded.worker.runs_a_dummy = False
    recorded.run(step(decodes=3))
    assert launched == 0
    assert [values[1] for values in recorded.end()] == [3]


def test_a_step_without_tokens_is_none(recorded: Recorded) -> None:
    recorded.worker.result = "empty"
    recorded.run(step())
    assert recorded.end() == []


def test_a_step_that_fails_is_none(recorded: Recorded, gpu: Gpu) -> None:
    recorded.worker.fail_with = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        recorded.worker.execute_model(step(decodes=1))
    recorded.worker.fail_with = None
    recorded.run(step(decodes=2))
    assert recorded.end() == [[0, 2, 0, 2, STEP_NS, 0, 0]]


def test_events_are_used_again(recorded: Recorded, gpu: Gpu) -> None:
    for _ in range(50):
        recorded.run(step(decodes=1, new={"a": 2}, items=1))
    assert gpu.made <= 3 * 2 * 2
    assert len(recorded.end()) == 50


def test_without_events_there_is_no_time(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_timer, "MAX_INTERVALS", 1)
    recorded.run(step(new={"a": 5}, items=2))
    assert recorded.end() == [[5, 0, 1, 0, None, 2, None]]


def test_a_gpu_that_never_answers(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timer, "MAX_WAITING", 2)
    for _ in range(3):
        recorded.worker.execute_model(step(decodes=1))
        recorded.worker.sample_tokens(None)
    assert [values[4] for values in recorded.end()] == [None, None, None]


def test_a_pause(recorded: Recorded) -> None:
    recorder = recorded.recording.recorder
    recorded.run(step(new={"a": 9}))
    recorder.wants_pause = True
    recorded.run(step(decodes=2))
    # What came meanwhile is known when it goes on: 4 of 9 tokens are left of this prompt.
    chunk = step(new={"b": 9})
    chunk.num_scheduled_tokens, chunk.total_num_scheduled_tokens = {"b": 5}, 5
    recorded.run(chunk)
    recorder.wants_pause = False
    recorded.run(step(decodes=3))
    rest = step()
    rest.num_scheduled_tokens, rest.total_num_scheduled_tokens = {"b": 4}, 4
    recorded.run(rest)
    assert [values[:2] for values in recorded.end()] == [[9, 0], [4, 0]]


def test_a_release_that_tells_less_costs_this_part_alone(
    recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    output = step(decodes=1)
    del output.finished_req_ids
    recorded.run(output)
    recorded.run(step(decodes=2))
    assert recorded.worker.ran.count("sample") == 2
    assert recorded.end() == []
    assert "gpu_steps.csv" in capfd.readouterr().err


def test_hooks_go_with_the_recording(recorded: Recorded) -> None:
    recorded.end()
    assert "execute_model" not in vars(recorded.worker)
    assert "sample_tokens" not in vars(recorded.worker)
    assert "_execute_mm_encoder" not in vars(recorded.worker)


@pytest.mark.parametrize("asked", ["0", "1"])
def test_off_means_no_hook(
    sessions: Path, model: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    from tests.graphs.executor import make

    monkeypatch.setenv("VLLM_PROFILING_PHASES", asked)
    watched, watch = [], phases.watch

    def noted(worker: Any, *given: Any) -> Phases:
        watched.append(type(worker).__name__)
        return watch(worker, *given)

    monkeypatch.setattr(phases, "watch", noted)
    make(model, "Worker")
    assert watched == ["Worker"] * int(asked)


def test_there_are_no_gpu_events_on_a_cpu(
    sessions: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.graphs.executor import make

    monkeypatch.setenv("VLLM_PROFILING_PHASES", "1")
    worker = make(model, "CpuWorker")
    assert not list(sessions.glob("*"))
    del worker


def test_the_table(
    sessions: Path, model: Path, tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a worker to the rows."""
    import torch

    from tests.graphs.executor import make

    monkeypatch.setenv("VLLM_PROFILING_PHASES", "1")
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    worker = make(model, "Worker")
    worker.compile_or_warm_up_model()
    for output in (step(new={"a": 5}, decodes=2), step(decodes=1)):
        worker.execute_model(output)
        gpu.catch_up()
    worker.execute_model(step(decodes=3))
    del worker
    gc.collect()
    tables = make_tables(only_session(sessions), tmp_path / "tables").folder
    assert [{**row, "timestamp_sec": None} for row in rows(tables / "gpu_steps.csv")] == [
        row_of(5, 2, 1, 2, 500),
        row_of(0, 1, 0, 1, 500),
        # The worker went before the GPU had done it.
        row_of(0, 3, 0, 3, None),
    ]
    known = json.loads((tables / "metadata.json").read_text())
    assert known["phases"] == {"workers": [0], "problem": None}


def row_of(
    prefill_tokens: int, decode_tokens: int, prefill: int, decode: int, gpu_us: int | None
) -> dict[str, Any]:
    """A row of gpu_steps.csv, without its time."""
    return {
        "timestamp_sec": None,
        "worker": 0,
        "prefill_tokens": prefill_tokens,
        "decode_tokens": decode_tokens,
        "prefill_reqs": prefill,
        "decode_reqs": decode,
        "gpu_us": gpu_us,
        "encoder_items": 0,
        "encoder_us": 0,
    }
