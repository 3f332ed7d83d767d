# SPDX-License-Identifier: Apache-2.0
"""What the workers recorded about their GPUs and CUDA graphs, as metadata.json has it.

Workers are given in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profilemate.collector.gpu_memory import Sampling, interval_sec, name_of
from profilemate.collector.producer import Producer

_MEMORY = (
    "total_bytes",
    "requested_bytes",
    "weights_bytes",
    "activation_bytes",
    "non_torch_bytes",
    "graphs_estimated_bytes",
    "graphs_estimate_applied",
    "graphs_bytes",
    "kv_bytes",
    "kv_allocated_bytes",
    "blocks",
)
"""What a worker found when vLLM divided the GPU's memory."""


def cuda_graphs(workers: Sequence[Producer]) -> dict[str, Any] | None:
    """How the first worker was configured to use CUDA graphs, and how it did."""
    if not workers:
        return None
    header, status = workers[0].header, workers[0].status
    graphs = {**(header.get("cuda_graphs") or {}), **(status.get("cuda_graphs") or {})}
    if not graphs:
        return None
    names = (
        "asked",
        "resolved",
        "attention_backends",
        "capture_sizes",
        "max_capture_size",
        "runner",
    )
    return {
        **{name: graphs.get(name) for name in names},
        "gpu_timing": bool(header.get("gpu_timing")),
    }


def memory(workers: Sequence[Producer]) -> dict[str, Any] | None:
    """The memory of the worker with the least left for the KV cache, which decides how many blocks
    all of them get; under ``workers`` that of each."""
    each = [
        {"worker": worker.header["rank"], **{name: found.get(name) for name in _MEMORY}}
        for worker in workers
        if (found := worker.status.get("memory"))
    ]
    if not each:
        return None
    known = [found for found in each if found["kv_bytes"] is not None]
    return {**min(known or each[:1], key=lambda found: found["kv_bytes"]), "workers": each}


def gpus(workers: Sequence[Producer], sampling: Sampling) -> list[dict[str, Any]]:
    """The GPUs, each with its workers. Each worker without a GPU's name counts as one GPU more."""
    found: dict[Any, dict[str, Any]] = {}
    for worker in workers:
        rank, gpu = worker.header["rank"], worker.header.get("gpu")
        if not gpu:
            continue
        name = name_of(gpu)
        entry = {
            "gpu": name if isinstance(name, int) else sampling.indexes.get(name or ""),
            "uuid": gpu.get("uuid"),
            "name": gpu.get("name"),
            "total_bytes": gpu.get("total_bytes"),
            "workers": [],
        }
        found.setdefault((rank,) if name is None else name, entry)["workers"].append(rank)
    return list(found.values())


def gpu_memory(workers: Sequence[Producer], sampling: Sampling) -> dict[str, Any] | None:
    """How GPU memory was sampled, or why it was not; None where no worker has a GPU."""
    headers = [worker.header for worker in workers]
    if not any(header.get("gpu") for header in headers):
        return None
    interval = interval_sec(headers)
    off = "switched off: VLLM_PROFILING_GPU_INTERVAL is 0"
    return {"interval_sec": interval, "problem": sampling.problem if interval else off}


def experts(workers: Sequence[Producer]) -> dict[str, Any] | None:
    """The MoE layers of all workers whose experts are counted; None where nobody counts any."""
    found = [known for worker in workers if (known := worker.status.get("experts"))]
    if not found:
        return None
    numbers = {number for known in found for number in known.get("layers") or ()}
    counting = [known for known in found if known.get("layers")]
    return {
        "layers": sorted(numbers),
        "experts": max((known.get("experts") or 0 for known in counting), default=None),
        "chosen": max((known.get("chosen") or 0 for known in counting), default=None),
        "pairs": any(known.get("pairs") for known in counting),
        "ranks": max((known.get("ranks") or 0 for known in counting), default=0) or None,
        "eplb": any(known.get("eplb") for known in counting),
        "problem": next((known["problem"] for known in found if known.get("problem")), None),
    }


def phases(engines: Sequence[Producer], workers: Sequence[Producer]) -> dict[str, Any] | None:
    """Which workers' steps are timed on the GPU, and why some are not; None where that was not
    asked for."""
    asked = [*workers, *engines]
    if not any(producer.header.get("phases") for producer in asked):
        return None
    timed = [worker for worker in workers if worker.header.get("device") == "cuda"]
    lost = (worker.lost["phases"]["reason"] for worker in timed if "phases" in worker.lost)
    problem = next(lost, None)
    if not timed:
        device = next(
            filter(None, (each.header.get("device") for each in asked)), "no known device"
        )
        problem = f"no GPU events: the workers run on {device}"
    return {"workers": [worker.header["rank"] for worker in timed], "problem": problem}


def experts_missing(producer: Producer) -> dict[str, str]:
    """The hook at a worker's routers, and why it is not there, where it was asked for."""
    problem = (producer.status.get("experts") or {}).get("problem")
    return {"experts": problem} if problem else {}
