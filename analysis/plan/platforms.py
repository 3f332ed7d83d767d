# SPDX-License-Identifier: Apache-2.0
"""On what will vLLM run, and what does that change about the cache?

The rules are those of vLLM 0.32: on a GPU its defaults and CUDA's attention kernels, on a CPU
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

    ``name``: as ``--platform`` takes it, and ``cpu`` for that of a recorded engine. ``device``:
    what one worker has, in a sentence. ``about``: what is known of the processor.
    ``block_size``: tokens of a block by default. ``kernel_block``: attention kernels read blocks
    of a multiple of this many tokens. ``latent_block``: the only size of block that latent
    attention takes, None for any. ``float32_states``: whether states are kept in float32 unless
    the model asks for another type; None where it is not known. ``asynchronous``: whether a batch
    is scheduled while another one runs.
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
"""A CPU like the one of this machine."""


def named(name: str) -> Platform:
    """The platform of this name.

    Raises:
        RuleError: there is none.

    """
    if name == HERE:
        return here()
    found = PLATFORMS.get(name)
    if found is None:
        known = ", ".join((HERE, *PLATFORMS))
        raise RuleError(f"--platform {name!r} is not known here; write one of {known}")
    return found


def here(file: Path = CPU_INFO) -> Platform:
    """The platform of vLLM's CPU build on this machine; a basic one where nothing tells more."""
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
        device: what it ran on, in vLLM's word.
        state_dtype: the type of states that vLLM settled on, None where not recorded.
        latent_blocks: tokens of its blocks of latent attention.

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
