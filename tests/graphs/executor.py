# SPDX-License-Identifier: Apache-2.0
"""What vLLM's executor does with a worker: it makes one and starts it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
UUID = "01234567-89ab-cdef-0123-456789abcdef"
"""Of the one GPU that there is."""


def make(model: Path, name: str, rank: int = 0, **engine_args: Any) -> Any:
    """A worker of that class, made as an executor makes it."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from tests.graphs import toys

    settings = toys.config(model, **engine_args)
    settings.parallel_config.worker_cls = f"tests.graphs.workers.{name}"
    wrapper = WorkerWrapperBase()
    wrapper.init_worker([{"vllm_config": settings, "rank": rank}])
    assert wrapper.worker.init_device() == "initialized"
    return wrapper.worker


def start(worker: Any) -> None:
    """What an engine asks of a worker before it serves."""
    assert worker.determine_available_memory() == 50 * GIB
    tensors = [SimpleNamespace(size=24 * GIB), SimpleNamespace(size=25 * GIB)]
    worker.initialize_from_config(SimpleNamespace(kv_cache_tensors=tensors, num_blocks=3136))
    assert worker.compile_or_warm_up_model() == 1.5
