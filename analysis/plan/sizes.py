# SPDX-License-Identifier: Apache-2.0
"""How many bytes are ``80GiB``, the memory of a GPU of this name, and a number of this type?"""

from __future__ import annotations

import re
from collections.abc import Mapping

from analysis.errors import RuleError
from analysis.plan.entries import said

GIB = 2**30

MOST_BYTES = 2**50
LEAST_BYTES = 2**30
"""Of a GPU: less is a size without its unit."""
"""More than any GPU or CPU has."""

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}

GPUS: Mapping[str, int] = {
    "V100-16GB": 16384,
    "T4": 15360,
    "A10G": 23028,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "L4": 23034,
    "L40S": 46068,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "H100": 81559,
    "H200": 143771,
    "B200": 183359,
}
"""MiB of memory, as nvidia-smi shows it. CUDA, and so vLLM, sees up to 1 % less."""

_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


def size(text: str) -> int:
    """The bytes of a size, such as 80GiB, 80 GB, 512MiB, or a plain number of bytes.

    Raises:
        RuleError: the text is no size.

    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise RuleError(f"{text!r} is not a size; write 80GiB, 24GB, 512MiB or plain bytes")
    number, unit = match[1], _UNITS[match[2]]
    return int(float(number) * unit) if "." in number else int(number) * unit


def gpu_memory(text: str) -> tuple[int, str]:
    """The memory of a GPU in bytes, by its name or its size, and where the figure comes from.

    Raises:
        RuleError: the text is neither a size that a GPU has nor a name that is known here.

    """
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    for name, mib in GPUS.items():
        if plain == re.sub(r"[^a-z0-9]", "", name.lower()):
            return mib * 2**20, f"{name}: as nvidia-smi shows it; CUDA sees up to 1 % less"
    try:
        found = size(text)
    except RuleError:
        names = ", ".join(GPUS)
        raise RuleError(
            f"{text!r} is no GPU known here ({names}) and no size; write 80GiB"
        ) from None
    if not LEAST_BYTES <= found < MOST_BYTES:
        many = "much" if found >= MOST_BYTES else "little"
        raise RuleError(f"--gpu {text!r}: no GPU has that {many} memory; write 80GiB")
    return found, "--gpu"


def cpu_memory(text: str) -> tuple[int, str]:
    """The memory of a CPU in bytes, and where the figure comes from.

    Raises:
        RuleError: the text is no size that a CPU has.

    """
    found = size(text)
    if not 0 < found < MOST_BYTES:
        raise RuleError(f"--cpu-memory {text!r}: no CPU has that much memory; write 64GiB")
    return found, "--cpu-memory"


def element_bytes(dtype: str, option: str) -> int:
    """Bytes of one number of this type, which ``option`` gave.

    Raises:
        RuleError: the type is not known here.

    """
    known = _BYTES.get(dtype.removeprefix("torch."))
    if known is None:
        raise RuleError(
            f"{option} {said(dtype)} is not known here; write one of {', '.join(_BYTES)}"
        )
    return known
