# SPDX-License-Identifier: Apache-2.0
"""What will vLLM run on, and how does that change the cache?

The rules are vLLM 0.32's: for a GPU its defaults and CUDA's attention kernels, for a CPU
``platforms/cpu.py`` and ``v1/attention/backends/cpu_attn.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from analysis.errors import RuleError

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux lists what the processor can do."""


@dataclass(frozen=True)
class Platform:
    """What vLLM runs on.

    ``name``: as ``--platform`` takes it; ``cpu`` for the CPU of a recorded engine. ``device``:
    what one worker runs on. ``about``: the processor, in words. ``block_size``: tokens of a block
    by default. ``kernel_block``: attention kernels read blocks of a multiple of so many tokens.
    ``latent_block``: the only block size that latent attention takes, in tokens; None where it
    takes any. ``float32_states``: whether vLLM keeps states in float32 where the model states no
    type; None where that is not known. ``asynchronous``: whether vLLM schedules a batch while
    another one runs.
    """

    name: str
    device: Literal["GPU", "CPU"]
    about: str
    block_size: int
    kernel_block: int
    latent_block: int | None
    float32_states: bool | None
    asynchronous: bool


GPU = Platform(
    name="gpu",
    device="GPU",
    about="",
    block_size=16,
    kernel_block=16,
    latent_block=None,
    float32_states=False,
    asynchronous=True,
)
BASIC_CPU = Platform(
    name="cpu-basic",
    device="CPU",
    about="without AVX512-BF16",
    block_size=128,
    kernel_block=32,
    latent_block=16,
    float32_states=False,
    asynchronous=False,
)
BF16_CPU = replace(
    BASIC_CPU, name="cpu-avx512-bf16", about="with AVX512-BF16, without AMX", float32_states=True
)
AMX_CPU = replace(BF16_CPU, name="cpu-amx", about="with AVX512-BF16 and AMX", latent_block=None)

PLATFORMS: Mapping[str, Platform] = {one.name: one for one in (GPU, BASIC_CPU, BF16_CPU, AMX_CPU)}
HERE = "cpu"
"""The name of a CPU like this machine's."""


def named(name: str) -> Platform:
    """The platform of this name.

    Raises:
        RuleError: no platform has this name.

    """
    if name == HERE:
        return here()
    found = PLATFORMS.get(name)
    if found is None:
        known = ", ".join((HERE, *PLATFORMS))
        raise RuleError(f"--platform {name!r} is not known here; write one of {known}")
    return found


def here(file: Path = CPU_INFO) -> Platform:
    """The platform of vLLM's CPU build on this machine; a basic CPU where ``file`` cannot be
    read."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    if "avx512_bf16" not in flags:
        found = BASIC_CPU
    else:
        found = AMX_CPU if "amx_tile" in flags else BF16_CPU
    return replace(found, about=f"{found.about}, as this machine's")


def recorded(device: str | None, state_dtype: str | None, latent_blocks: set[int]) -> Platform:
    """The platform of a recorded engine.

    Args:
        device: vLLM's word for what the engine ran on.
        state_dtype: the type that the engine chose for states; None where it was not recorded.
        latent_blocks: the block sizes of its latent attention, in tokens.

    """
    if device != "cpu":
        return GPU
    return replace(
        BASIC_CPU,
        name="cpu",
        about="as the session's engine had it",
        latent_block=16 if latent_blocks == {16} else None,
        float32_states=None if state_dtype is None else state_dtype == "float32",
    )
