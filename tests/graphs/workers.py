# SPDX-License-Identifier: Apache-2.0
"""Workers with a toy model, which keep what vLLM's do in the attributes of two releases.

vLLM's WorkerWrapperBase makes them by the names of their classes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.graphs.toys import Runner

GIB = 1 << 30


class Worker:
    """As of vLLM 0.22.1."""

    cuda: Any = None
    """The stand-in that the next worker runs on."""
    device_type = "cuda"

    def __init__(self, vllm_config: Any, rank: int) -> None:
        self.vllm_config = vllm_config
        self.rank = rank

    def init_device(self) -> str:
        """Take a GPU; returns what nobody else would."""
        self.device = torch.device(self.device_type, 0)
        self.init_snapshot = SimpleNamespace(total_memory=80 * GIB)
        self.requested_memory = 72 * GIB
        self.model_runner = Runner(self.vllm_config, self.cuda)
        self.model_runner.model_memory_usage = 14 * GIB  # type: ignore[attr-defined]
        return "initialized"

    def determine_available_memory(self) -> int:
        """Profile, subtract, and return what is left."""
        self.cudagraph_memory_estimate = 2 * GIB
        self.model_runner.profile_cudagraph_memory()
        self.keep_profile()
        self.available_kv_cache_memory_bytes = 50 * GIB
        return self.available_kv_cache_memory_bytes

    def keep_profile(self) -> None:
        """Keep what was found."""
        self.non_torch_memory = 1 * GIB
        self.peak_activation_memory = 5 * GIB

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache."""

    def compile_or_warm_up_model(self) -> float:
        """Capture, and warm up with a request that nobody made."""
        self.model_runner.capture_model()
        self.model_runner.execute_model(_ONE_TOKEN)
        return 1.5

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        return self.model_runner.execute_model(scheduler_output)


class Worker032(Worker):
    """As of vLLM 0.32: weights and all else in one number, the estimate within activations."""

    def keep_profile(self) -> None:
        """Keep what was found."""
        self.total_consumed = 15 * GIB
        self.peak_activation_memory = 7 * GIB


class CpuWorker(Worker):
    """One that has no GPU."""

    device_type = "cpu"


_ONE_TOKEN = SimpleNamespace(tokens=[1], total_num_scheduled_tokens=1)
