# SPDX-License-Identifier: Apache-2.0
"""What a worker knows: its rank and GPU, its CUDA graph settings, and the memory that it found.

As in ``facts``, each fact is read on its own, and is null where the release does not have it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from profilemate.hooks.kv.facts import engine_rank, fact, versions


def describe(worker: Any) -> dict[str, Any]:
    """The facts of one worker that has its device, ready for its journal's header."""
    config = worker.vllm_config
    engine = engine_rank(config)
    # Each data-parallel rank counts its own workers from 0.
    rank = engine * int(config.parallel_config.world_size) + int(worker.rank)
    described = {
        "rank": rank,
        "engine": engine,
        "versions": versions(),
        "device": worker.device.type,
    }
    if worker.device.type != "cuda":
        return described
    return {
        **described,
        "gpu": _gpu(worker.device),
        "pynvml": fact(_vendored_pynvml),
        "cuda_graphs": {
            "asked": fact(lambda: mode_name(config.compilation_config.cudagraph_mode)),
            "capture_sizes": fact(lambda: _capture_sizes(config.compilation_config)),
            "max_capture_size": fact(
                lambda: int(config.compilation_config.max_cudagraph_capture_size)
            ),
            "runner": "V2" if ".gpu." in type(worker.model_runner).__module__ else "V1",
        },
    }


def resolved_graphs(worker: Any) -> dict[str, Any]:
    """The mode that vLLM resolved, once the attention backends are known, and its sizes."""
    runner = worker.model_runner
    config = worker.vllm_config.compilation_config
    return {
        "resolved": fact(lambda: mode_name(runner.cudagraph_manager.cudagraph_mode))
        or fact(lambda: mode_name(runner.cudagraph_dispatcher.cudagraph_mode))
        or fact(lambda: mode_name(config.cudagraph_mode)),
        "attention_backends": fact(lambda: _backends(runner)),
        "capture_sizes": fact(lambda: _capture_sizes(config)),
        "max_capture_size": fact(lambda: int(config.max_cudagraph_capture_size)),
    }


def mode_name(mode: Any) -> str | None:
    """The name of a mode, None where there is none."""
    return None if mode is None else str(getattr(mode, "name", mode))


def _allocated(tensors: Any) -> int:
    """Bytes of the KV cache's tensors. From vLLM 0.29 on they share one allocation, whose size each
    of them has."""
    sizes = [int(tensor.size) for tensor in tensors]
    return max(sizes) if hasattr(tensors[0], "layer_stride") else sum(sizes)


class StartUp:
    """What a worker's start-up methods get and return, which vLLM does not keep."""

    def __init__(self) -> None:
        self._kv_cache: dict[str, Any] = {}
        self._graphs_bytes: int | None = None

    def take_kv_cache(self, _: Any, kv_cache_config: Any) -> None:
        """Note the argument of ``initialize_from_config``."""
        self._kv_cache = {
            "kv_allocated_bytes": fact(lambda: _allocated(kv_cache_config.kv_cache_tensors)),
            "blocks": fact(lambda: int(kv_cache_config.num_blocks)),
        }

    def take_capture(self, taken: Any, *_: Any) -> None:
        """Note the result of ``capture_model``: bytes of device memory."""
        self._graphs_bytes = fact(lambda: int(taken))

    def memory(self, worker: Any) -> dict[str, Any]:
        """The worker's memory in bytes, as far as it is known by now."""
        applied = fact(lambda: bool(_envs().VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS))
        return {
            "total_bytes": fact(lambda: int(worker.init_snapshot.total_memory)),
            "requested_bytes": fact(lambda: int(worker.requested_memory)),
            "weights_bytes": fact(lambda: int(worker.model_runner.model_memory_usage)),
            "activation_bytes": fact(lambda: _activation(worker, applied)),
            "non_torch_bytes": fact(lambda: _non_torch(worker)),
            "graphs_estimated_bytes": fact(lambda: int(worker.cudagraph_memory_estimate)),
            "graphs_estimate_applied": applied,
            "graphs_bytes": self._graphs_bytes,
            "kv_bytes": fact(lambda: int(worker.available_kv_cache_memory_bytes)),
            **self._kv_cache,
        }


def _activation(worker: Any, applied: bool | None) -> int:
    peak = int(worker.peak_activation_memory)
    if hasattr(worker, "total_consumed") and applied:
        # These releases add the two up.
        return peak - int(worker.cudagraph_memory_estimate)
    return peak


def _non_torch(worker: Any) -> int:
    if hasattr(worker, "total_consumed"):
        return int(worker.total_consumed) - int(worker.model_runner.model_memory_usage)
    return int(worker.non_torch_memory)


def _envs() -> Any:
    return sys.modules["vllm.envs"]


def _capture_sizes(config: Any) -> list[int] | None:
    sizes = config.cudagraph_capture_sizes
    return None if sizes is None else sorted(int(size) for size in sizes)


def _backends(runner: Any) -> list[str]:
    groups = (group for groups in runner.attn_groups for group in groups)
    return sorted({_backend_name(group.backend) for group in groups})


def _backend_name(backend: Any) -> str:
    return str(fact(backend.get_name) or backend.__name__)


def _gpu(device: Any) -> dict[str, Any]:
    cuda = sys.modules["torch"].cuda
    index = fact(lambda: int(cuda.current_device() if device.index is None else device.index))
    properties = fact(lambda: cuda.get_device_properties(index))
    uuid = fact(lambda: _nvml_uuid(str(properties.uuid)))
    return {
        "index": index,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "uuid": uuid or fact(lambda: _platform().get_device_uuid(index)),
        "name": fact(lambda: str(properties.name)),
        "total_bytes": fact(lambda: int(properties.total_memory)),
    }


def _nvml_uuid(uuid: str) -> str | None:
    """A UUID of torch's as NVML writes it; None for a placeholder."""
    if not uuid.strip("0-"):
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _platform() -> Any:
    return sys.modules["vllm.platforms"].current_platform


def _vendored_pynvml() -> str | None:
    """Where vLLM keeps its copy of nvidia-ml-py."""
    (folder,) = sys.modules["vllm"].__path__
    path = os.path.join(folder, "third_party", "pynvml.py")
    return path if os.path.exists(path) else None
