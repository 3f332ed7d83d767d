# SPDX-License-Identifier: Apache-2.0
"""Which settings does vLLM serve the model with, and what does it run on?"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.errors import RuleError
from analysis.plan.platforms import GPU, Platform

UTILIZATION = 0.92
"""The default of ``--gpu-memory-utilization`` in vLLM 0.32. Older releases have 0.9."""


@dataclass(frozen=True)
class Settings:
    """vLLM's settings, by vLLM's names, and what it runs on.

    ``gpu_bytes``: memory of one GPU, or of one CPU (a NUMA node); None where none was named.
    ``gpu_source``: where that figure comes from. ``max_model_len``: None for the model's.
    ``block_size``: None for the platform's. ``kv_cache_dtype``: ``auto`` for the model's.
    ``state_dtype``: the type that a recorded engine chose for states (``mamba_ssm_cache_dtype``);
    None where the model and the platform choose it. ``other_bytes``: bytes of a GPU for
    activations, CUDA graphs and all that torch does not allocate. ``weight_bytes``: bytes of the
    whole model; None where its files or its configuration decide. ``kv_bytes`` and ``blocks``:
    given as by ``--kv-cache-memory-bytes`` and ``--num-gpu-blocks-override``, in place of what
    the memory leaves. ``in_flight_batches``: how many batches of ``max_num_batched_tokens`` are
    in flight at once; None for the platform's number, which is two with asynchronous scheduling.
    ``hybrid``: whether layers with a window keep only their window.
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
        """Tokens that may be in flight, as vLLM's ``VllmConfig.max_in_flight_tokens`` counts
        them. A sequence keeps them beside its window."""
        batches = self.in_flight_batches or self.pipeline_parallel + self.platform.asynchronous
        return batches * self.batched_tokens

    @property
    def batched_tokens(self) -> int:
        """Tokens of a step at most: ``max_num_batched_tokens``, or the default of vLLM's server
        for a GPU of this size, or for so many CPUs."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.platform.device == "CPU":
            return 2048 * self.tensor_parallel * self.pipeline_parallel
        memory = (self.gpu_bytes or 0) / 2**30
        return 16384 if memory >= 160 else 8192 if memory >= 70 else 2048


def check(settings: Settings) -> Settings:
    """Return the settings if each is in its range.

    Raises:
        RuleError: a setting is out of its range.

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
    """Check that an option's value, where given, is a count.

    Raises:
        RuleError: the value is out of range.

    """
    if value is not None and not 0 < value <= 10**9:
        raise RuleError(f"{option} {value}: write a whole number from 1 on")
