# SPDX-License-Identifier: Apache-2.0
"""Workers made by vLLM's WorkerWrapperBase: each is recorded from when it has its GPU."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profilemate.collector.journal_reader import JournalReader
from tests.graphs.executor import GIB, UUID, make, start
from tests.graphs.recording import Execution, Recorded, read
from tests.graphs.steps import Output, decode
from tests.kv.recording import only_session, wait_until_written


def journal(sessions: Path, rank: int = 0) -> Path:
    return only_session(sessions) / "journal" / f"worker{rank}.journal"


def header(path: Path) -> dict[str, Any]:
    """What a journal begins with."""
    reader = JournalReader(path)
    (_, first, _), *_ = reader.read()
    reader.close()
    found: dict[str, Any] = json.loads(first)
    return found


@pytest.mark.parametrize("name", ["Worker", "Worker032"])
def test_a_worker(model: Path, sessions: Path, cuda: Any, name: str) -> None:
    worker = make(model, name)
    start(worker)
    captured = cuda.count("end")
    began = len(worker.model_runner.seen)
    for step in (decode(3), Output([5])):
        worker.execute_model(step)
    known = header(journal(sessions))
    seen = worker.model_runner.seen
    del worker
    gc.collect()
    found = read(journal(sessions))

    assert len(found.captures) == captured
    assert found.executions[:began] == [execution._replace(dummy=1) for execution in seen[:began]]
    assert found.executions[began:] == seen[began:]
    assert seen[began:] == [
        Execution(("FULL", 4, 4, 1, 0), 3, 1),
        Execution(("PIECEWISE", 8, None, 0, 0), 5, 3),
    ]
    assert found.status["memory"] == {
        "total_bytes": 80 * GIB,
        "requested_bytes": 72 * GIB,
        "weights_bytes": 14 * GIB,
        "activation_bytes": 5 * GIB,
        "non_torch_bytes": 1 * GIB,
        "graphs_estimated_bytes": 2 * GIB,
        "graphs_estimate_applied": True,
        "graphs_bytes": 19 * cuda.graph_bytes,
        "kv_bytes": 50 * GIB,
        "kv_allocated_bytes": 49 * GIB,
        "blocks": 3136,
    }
    assert known["producer"] == "worker"
    assert (known["rank"], known["engine"], known["device"]) == (0, 0, "cuda")
    assert known["gpu"]["uuid"] == f"GPU-{UUID}"
    assert (known["gpu"]["index"], known["gpu"]["name"]) == (0, "Toy GPU")
    assert known["gpu"]["total_bytes"] == 80 * GIB
    assert known["cuda_graphs"] == {
        "asked": "FULL_AND_PIECEWISE",
        "capture_sizes": [1, 2, 4, 8, 16],
        "max_capture_size": 16,
        "runner": "V1",
    }
    assert (known["gpu_timing"], known["gpu_interval_sec"]) == (False, 1.0)
    assert found.status["cuda_graphs"]["resolved"] == "FULL_AND_PIECEWISE"


def test_a_rank_of_several(model: Path, sessions: Path) -> None:
    worker = make(model, "Worker", rank=1, tensor_parallel_size=2)
    assert header(journal(sessions, 1))["rank"] == 1
    del worker


def test_two_workers_of_one_process(model: Path, sessions: Path, cuda: Any) -> None:
    """As two LLM objects: graphs belong to the worker that captured them, which was made last."""
    first = make(model, "Worker")
    # Without their trial captures: vLLM throws all graphs of the process away after those.
    first.compile_or_warm_up_model()
    second = make(model, "Worker", rank=1)
    second.compile_or_warm_up_model()
    began = [len(worker.model_runner.seen) for worker in (first, second)]
    second.execute_model(decode(3))
    first.execute_model(Output([5]))
    second.execute_model(decode(2))
    seen = [worker.model_runner.seen for worker in (first, second)]
    del first
    gc.collect()
    second.execute_model(decode(1))
    del second
    gc.collect()
    for rank in (0, 1):
        found = read(journal(sessions, rank))
        assert found.executions[began[rank] :] == seen[rank][began[rank] :]
        assert not found.replays
        assert len(found.captures) == cuda.count("end") / 2
    assert not hasattr(cuda.graph_class.replay, "__wrapped__")


def test_gpu_timing_is_off_unless_asked_for(
    model: Path, sessions: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from tests.graphs.test_gpu_timer import HALF_MS, Gpu

    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    monkeypatch.setenv("VLLM_PROFILING_GPU_TIMING", "1")
    worker = make(model, "Worker")
    start(worker)
    worker.execute_model(decode(3))
    gpu.catch_up()
    worker.execute_model(decode(0))
    worker.execute_model(Output([30]))
    assert header(journal(sessions))["gpu_timing"] is True
    del worker
    gc.collect()
    found = read(journal(sessions))
    assert [gpu_ns for _, gpu_ns in found.times[-2:]] == [HALF_MS, None]


def test_without_a_gpu_nothing_is_recorded(model: Path, sessions: Path, cuda: Any) -> None:
    worker = make(model, "CpuWorker")
    assert not sessions.exists()
    assert "init_device" not in vars(worker)
    assert not hasattr(cuda.graph_class.replay, "__wrapped__")


def test_switched_off(model: Path, sessions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PROFILING", "0")
    worker = make(model, "Worker")
    start(worker)
    assert not sessions.exists()
    assert "execute_model" not in vars(worker.model_runner)


def test_a_worker_that_is_not_known_is_reported_and_runs(
    toys: Any, model: Path, sessions: Path, cuda: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.graphs.workers import Worker

    class Odd(Worker):
        """One with a model runner of another make."""

        def init_device(self) -> str:
            """Take a GPU."""
            super().init_device()
            self.model_runner = SimpleNamespace(run=lambda: 7)
            return "initialized"

    odd = Odd(toys.config(model), 0)
    odd.init_device()
    from profilemate.hooks.gpu import worker

    worker.watch(odd)
    said = capfd.readouterr().err
    assert said.count("no longer recorded: cuda_graph_timeline.csv (attaching: Attribute") == 1
    assert odd.model_runner.run() == 7
    assert hasattr(cuda.graph_class.replay, "__wrapped__")
    wait_until_written()
    assert set(read(journal(sessions)).status["lost"]) == {"executions"}


def test_start_up_numbers_that_fail_do_not_end_the_recording(
    model: Path, sessions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from profilemate.hooks.gpu import worker_facts

    def fail(*_: Any) -> None:
        raise RuntimeError("no such number")

    monkeypatch.setattr(worker_facts.StartUp, "take_capture", fail)
    worker = make(model, "Worker")
    start(worker)
    worker.execute_model(decode(3))
    del worker
    gc.collect()
    found: Recorded = read(journal(sessions))
    assert found.status["failed"] == {"capture_model": "RuntimeError: no such number"}
    assert found.executions[-1] == Execution(("FULL", 4, 4, 1, 0), 3, 1)


def test_tensors_in_one_allocation(model: Path) -> None:
    """Two groups of a hybrid model, as vLLM 0.32 lays their layers out, take the memory once."""
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from profilemate.hooks.gpu.worker_facts import StartUp
    from tests.graphs import toys

    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    specs: dict[str, Any] = {"full": FullAttentionSpec(**common)}
    specs |= {f"window{i}": SlidingWindowSpec(**common, sliding_window=64) for i in (1, 2)}
    available = 1 << 20
    settings = toys.config(model)
    settings.cache_config.kv_cache_layout = "LBNHC"
    (config,) = get_kv_cache_configs(settings, [specs], [available])
    assert len(config.kv_cache_tensors) > 1
    facts = StartUp()
    facts.take_kv_cache(None, config)
    taken = facts.memory(None)["kv_allocated_bytes"]
    page = next(iter(specs.values())).page_size_bytes
    assert available - len(specs) * page < taken <= available


@pytest.mark.parametrize("name", ["Worker", "CpuWorker"])
def test_a_dense_model_has_no_experts_to_count(
    model: Path, sessions: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("VLLM_PROFILING_EXPERTS", "1")
    worker = make(model, name)
    assert sessions.exists() == (name == "Worker")
    if name == "Worker":
        start(worker)
        worker.execute_model(decode(3))
        del worker
        gc.collect()
        found = read(journal(sessions))
        assert found.executions
        assert "experts" not in found.status
