# SPDX-License-Identifier: Apache-2.0
"""What metadata.json says of workers, their GPUs and their CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profilemate import collector
from profilemate.collector import clock as clocks
from profilemate.collector.clock import Clock
from profilemate.format.folder import Folder
from profilemate.format.session import Founding
from tests.collector.journals import (
    MEMORY,
    EngineJournal,
    Journal,
    WorkerJournal,
    metadata,
)

GRAPHS = {
    "asked": "FULL_AND_PIECEWISE",
    "capture_sizes": [1, 2, 4],
    "max_capture_size": 4,
    "runner": "V2",
}


def gpu(uuid: str | None, index: int = 0) -> dict[str, Any]:
    return {"uuid": uuid, "index": index, "name": "NVIDIA H100", "total_bytes": 85_000_000_000}


def finalized(*journals: Journal) -> dict[str, Any]:
    """The metadata of a session all of whose processes were killed."""
    for journal in journals:
        journal.killed()
    collector.finalize(journals[0].folder)
    return metadata(journals[0].folder)


def test_session_without_workers(tmp_path: Path) -> None:
    found = finalized(EngineJournal(tmp_path, device="cpu"))
    assert found["device"] == "cpu"
    assert found["cuda_graphs"] is found["memory"] is found["gpu_memory"] is None
    assert found["gpus"] == []


def test_journals_that_do_not_name_their_device(tmp_path: Path) -> None:
    assert finalized(EngineJournal(tmp_path))["device"] is None


def test_worker_alone(tmp_path: Path) -> None:
    """An engine that could not be recorded leaves the worker's facts."""
    worker = WorkerJournal(tmp_path, device="cuda", cuda_graphs=GRAPHS, gpu_timing=True)
    worker.status(cuda_graphs={"resolved": "PIECEWISE"})
    worker.status(cuda_graphs={"attention_backends": ["FLASH_ATTN"]})
    found = finalized(worker)
    assert found["device"] == "cuda"
    assert found["versions"] == {"vllm": "0.33.0"}
    assert found["cuda_graphs"] == {
        **GRAPHS,
        "resolved": "PIECEWISE",
        "attention_backends": ["FLASH_ATTN"],
        "gpu_timing": True,
    }
    assert found["model"] is found["parallel"] is found["memory"] is found["gpu_memory"] is None
    (process,) = found["processes"]
    assert (process["role"], process["rank"], process["ended"]) == ("worker", 0, "killed")


def test_hooks_that_fail_one_after_another(tmp_path: Path) -> None:
    worker = WorkerJournal(tmp_path)
    worker.status(failed={"one": "first"})
    worker.status(failed={"two": "second"})
    found = finalized(worker)
    assert found["processes"][0]["hooks_failed"] == {"one": "first", "two": "second"}
    assert not found["complete"]


def test_events_that_were_dropped(tmp_path: Path) -> None:
    """A session is not complete, whether or not its journal says why they were."""
    worker = WorkerJournal(tmp_path)
    worker.recorder.costs.dropped = 3
    worker.status(cuda_graphs={})
    found = finalized(worker)
    assert found["processes"][0]["hooks_failed"] == {}
    assert (found["dropped_events"], found["complete"]) == (3, False)


def test_first_worker_is_the_one_with_the_lowest_rank(tmp_path: Path) -> None:
    """Not the one whose name comes first."""
    ten = WorkerJournal(tmp_path, 10, cuda_graphs={**GRAPHS, "runner": "V1"})
    two = WorkerJournal(tmp_path, 2, cuda_graphs=GRAPHS)
    found = finalized(ten, two)
    assert found["cuda_graphs"]["runner"] == "V2"
    assert found["cuda_graphs"]["resolved"] is None


def test_memory_is_that_of_the_worker_with_the_least_left(tmp_path: Path) -> None:
    workers = [WorkerJournal(tmp_path, rank) for rank in range(4)]
    for worker, kv_bytes in zip(workers, (500, 300, None, 300), strict=True):
        worker.status(memory={"total_bytes": 1_000, "kv_bytes": kv_bytes})
        worker.status(memory={"graphs_bytes": 7, "graphs_estimate_applied": True})
    found = finalized(*workers, WorkerJournal(tmp_path, 4))["memory"]
    fields = {
        "total_bytes": 1_000,
        "requested_bytes": None,
        "weights_bytes": None,
        "activation_bytes": None,
        "non_torch_bytes": None,
        "graphs_estimated_bytes": None,
        "graphs_estimate_applied": True,
        "graphs_bytes": 7,
        "kv_bytes": 300,
        "kv_allocated_bytes": None,
        "blocks": None,
    }
    each = found.pop("workers")
    assert found == {**fields, "worker": 1}
    assert each == [
        {**fields, "kv_bytes": kv_bytes, "worker": rank}
        for rank, kv_bytes in enumerate((500, 300, None, 300))
    ]


def test_memory_whose_share_nobody_knows(tmp_path: Path) -> None:
    workers = [WorkerJournal(tmp_path, rank) for rank in (0, 1)]
    for worker in workers:
        worker.status(memory={"weights_bytes": 5 + worker.path.name.count("1")})
    found = finalized(*workers)["memory"]
    assert (found["worker"], found["weights_bytes"], found["kv_bytes"]) == (0, 5, None)


def test_gpus(tmp_path: Path) -> None:
    """Two workers on one GPU, one on another, two on GPUs that cannot be distinguished, and two on
    the one that CUDA_VISIBLE_DEVICES names."""
    visible = {**gpu(None, 1), "visible": "6,7"}
    gpus = [gpu("GPU-a"), gpu("GPU-b", 1), gpu("GPU-a"), gpu(None), gpu(None), None]
    gpus += [visible, visible]
    workers = [WorkerJournal(tmp_path, rank, gpu=facts) for rank, facts in enumerate(gpus)]
    found = finalized(*workers)
    same = {"gpu": None, "name": "NVIDIA H100", "total_bytes": 85_000_000_000}
    assert found["gpus"] == [
        {**same, "uuid": "GPU-a", "workers": [0, 2]},
        {**same, "uuid": "GPU-b", "workers": [1]},
        {**same, "uuid": None, "workers": [3]},
        {**same, "uuid": None, "workers": [4]},
        {**same, "uuid": None, "workers": [6, 7], "gpu": 7},
    ]


def test_what_the_sampling_collector_found_is_kept(tmp_path: Path) -> None:
    """Its indexes, its problem: whoever finalizes cannot ask NVML for them."""
    worker = WorkerJournal(tmp_path, gpu=gpu("GPU-a"), gpu_interval_sec=0.5)
    earlier = {
        "gpus": [{"gpu": 3, "uuid": "GPU-a"}, {"gpu": None, "uuid": None}],
        "gpu_memory": {"interval_sec": 0.5, "problem": "GPU-a: GPU is lost"},
    }
    (worker.folder / "metadata.json").write_text(json.dumps(earlier))
    found = finalized(worker)
    assert found["gpus"][0]["gpu"] == 3
    assert found["gpu_memory"] == {"interval_sec": 0.5, "problem": "GPU-a: GPU is lost"}


def test_samples_without_a_problem(tmp_path: Path) -> None:
    worker = WorkerJournal(tmp_path, gpu=gpu("GPU-a"), gpu_interval_sec=1.0)
    (worker.folder / MEMORY).write_text("timestamp_sec,gpu\n1,0\n")
    assert finalized(worker)["gpu_memory"] == {"interval_sec": 1.0, "problem": None}


def test_no_collector_no_samples(tmp_path: Path) -> None:
    worker = WorkerJournal(tmp_path, gpu=gpu("GPU-a"), gpu_interval_sec=1.0)
    (worker.folder / "metadata.json").write_text("{torn")
    found = finalized(worker)["gpu_memory"]
    assert found["problem"] == (
        "no collector followed the session, and only a collector takes samples"
    )


def test_sampling_that_was_switched_off(tmp_path: Path) -> None:
    worker = WorkerJournal(tmp_path, gpu=gpu("GPU-a"), gpu_interval_sec=0.0)
    assert finalized(worker)["gpu_memory"] == {
        "interval_sec": 0.0,
        "problem": "switched off: VLLM_PROFILING_GPU_INTERVAL is 0",
    }


def test_a_wall_clock_that_is_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between its two extremes is how far a time may be off."""
    founding = Founding("session_x", "gpu-1", 5_000_000_000, 1_000.0, b"", [])
    clock = Clock()
    assert clock.content() is None
    for sec, wall_sec, error_sec in (
        (1, 1_001.0, 0.002),
        (2, 1_001.75, 0.004),
        (3, 1_003.5, 0.001),
    ):
        both = int(wall_sec * 1e9), founding.origin_ns + sec * 1_000_000_000
        monkeypatch.setattr(clocks, "_both", lambda both=both: both)
        monkeypatch.setattr(clocks, "kernel_error_sec", lambda error=error_sec: error)
        clock.check(founding)
    assert clock.content() == {
        "checkpoints": 3,
        "last_sec": 3.0,
        "least_drift_sec": -0.25,
        "most_drift_sec": 0.5,
        "error_sec": 0.004,
    }
    monkeypatch.setattr(clocks, "kernel_error_sec", lambda: None)
    clock.check(founding)
    assert clock.error_sec is None


def test_the_clock_of_a_collector_that_was_started_again(tmp_path: Path) -> None:
    said = {
        "checkpoints": 3,
        "last_sec": 3.0,
        "least_drift_sec": -0.25,
        "most_drift_sec": 0.5,
        "error_sec": 0.004,
    }
    for content, known in (
        (json.dumps({"clock": said}), said),
        (json.dumps({"clock": None}), None),
        ("[", None),
        (json.dumps({"clock": {**said, "last_sec": "x"}}), None),
    ):
        (tmp_path / "metadata.json").write_text(content)
        with Folder.own(tmp_path) as folder:
            assert Clock.of(folder).content() == known
