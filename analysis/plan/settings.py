# SPDX-License-Identifier: Apache-2.0
"""With which settings will vLLM serve the model, and on what?"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.errors import RuleError
from analysis.plan.platforms import GPU, Platform

UTILIZATION = 0.92
"""vLLM's default of ``--gpu-memory-utilization``, in 0.32; 0.9 in older releases."""


@dataclass(frozen=True)
class Settings:
    """What vLLM is told, by its own names, and on what it runs.

    ``gpu_bytes``: memory of one GPU, or of one CPU (a NUMA node), None where none was named;
    ``gpu_source``: where that comes from. ``max_model_len``: None for the model's.
    ``block_size``: None for the platform's. ``kv_cache_dtype``: ``auto`` for the model's.
    ``state_dtype``: the type of states that an engine settled on (``mamba_ssm_cache_dtype``),
    None for what the model and the platform make of it. ``other_bytes``: what activations, CUDA
    graphs and everything that torch does not allocate take of a GPU. ``weight_bytes``: of the
    whole model, None for what its files or its configuration say. ``kv_bytes`` and ``blocks``:
    given in place of what would be left, as by ``--kv-cache-memory-bytes`` and
    ``--num-gpu-blocks-override``. ``in_flight_batches``: batches of ``max_num_batched_tokens`` at
    once, None for the platform's: two with asynchronous scheduling. ``hybrid``: whether layers
    with a window or a state keep only that.
    """

    platform: Platform = GPU
    gpu_bytes: int | None = None
    gpu_source: str = ""
    gpu_memory_utilization: float = UTILIZATION
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    state_dtype: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefix_caching: bool = True
    max_num_batched_tokens: int | None = None
    in_flight_batches: int | None = None
    hybrid: bool = True
    other_bytes: int = 0
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    blocks: int | None = None

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not yet settled: a sequence keeps them beside its
        window (vLLM's ``VllmConfig.max_in_flight_tokens``)."""
        batches = self.in_flight_batches or self.pipeline_parallel + self.platform.asynchronous
        return batches * self.batched_tokens

    @property
    def batched_tokens(self) -> int:
        """``max_num_batched_tokens``, or what a server of vLLM takes for a GPU of this size, and
        for so many CPUs."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.platform.device == "CPU":
            return 2048 * self.tensor_parallel * self.pipeline_parallel
        memory = (self.gpu_bytes or 0) / 2**30
        return 16384 if memory >= 160 else 8192 if memory >= 70 else 2048


def check(settings: Settings) -> Settings:
    """The settings, if vLLM could take them.

    Raises:
        RuleError: one is out of its range.

    """
    if not 0 < settings.gpu_memory_utilization <= 1:
        raise RuleError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization:g}: write a share of the "
            "GPU's memory over 0 and up to 1"
        )
    counts = {
        "--max-model-len": settings.max_model_len,
        "--block-size": settings.block_size,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--pipeline-parallel-size": settings.pipeline_parallel,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--num-gpu-blocks-override": settings.blocks,
    }
    for option, value in counts.items():
        check_count(option, value)
    return settings


def check_count(option: str, value: int | None) -> None:
    """Nothing, if a count that was given is one.

    Raises:
        RuleError: it is not.

    """
    if value is not None and not 0 < value <= 10**9:
        raise RuleError(f"{option} {value}: write a whole number from 1 on")
