# SPDX-License-Identifier: Apache-2.0
"""The machine that a figure is from, in words that do not name its owner."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def describe() -> str:
    """Processor, cores, Python and vLLM: figures compare only where these are the same."""
    return f"{_processor()}, {_cores()} cores, Python {platform.python_version()}, {_vllm()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _vllm() -> str:
    try:
        return f"vLLM {metadata.version('vllm')}"
    except metadata.PackageNotFoundError:
        return "no vLLM"
