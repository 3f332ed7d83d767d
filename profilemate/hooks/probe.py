# SPDX-License-Identifier: Apache-2.0
"""Which targets the vLLM of this environment has: ``python -m profilemate.hooks.probe``.

It runs in a process of its own, since it imports vLLM, which takes long and may fail. Prints JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from typing import Any

from profilemate.hooks.targets import TARGETS, expected


def probe() -> dict[str, Any]:
    """The release, its device, and each target: ``found``, ``missing`` or ``not expected``.

    ``class`` names the class behind a target's name, where it is not vLLM's own.
    """
    vllm = importlib.import_module("vllm")
    version = str(getattr(vllm, "__version__", ""))
    wanted = set(expected(version))
    found = []
    with contextlib.suppress(Exception):
        importlib.import_module("vllm.plugins").load_general_plugins()
    for target in TARGETS:
        row: dict[str, Any] = {
            "owner": f"{target.module}.{target.owner}",
            "method": target.method,
            "gives": target.gives,
            "part": target.part,
            "class": None,
            "reason": None,
        }
        try:
            owner = getattr(importlib.import_module(target.module), target.owner)
            method = inspect.getattr_static(owner, target.method, None)
        except Exception as error:
            # vLLM for CPUs has modules that cannot be imported without CUDA.
            row["reason"] = f"{type(error).__name__}: {error}"
            method = None
        else:
            real = f"{owner.__module__}.{owner.__qualname__}"
            if real not in (row["owner"], "torch.cuda.graphs.CUDAGraph"):
                row["class"] = real
        has_it = method is not None
        row["state"] = "found" if has_it else "missing" if target in wanted else "not expected"
        found.append(row)
    return {"version": version, "device": _device(), "targets": found}


def _device() -> str | None:
    """The kind of device that this vLLM is for."""
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
        return str(platform.device_type)
    except Exception:
        return None


if __name__ == "__main__":
    # vLLM may write to stdout, too: only the last line is ours.
    result = probe()
    sys.stdout.flush()
    os.write(1, b"\n" + json.dumps(result).encode() + b"\n")
