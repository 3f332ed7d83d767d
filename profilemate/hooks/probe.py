# SPDX-License-Identifier: Apache-2.0
"""What of the targets the vLLM in this environment has: ``python -m profilemate.hooks.probe``.

Run in a process of its own, since it imports vLLM, which takes long and may fail. Prints JSON.
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
    """The release, its plugins, and each target: ``attached``, ``missing``, ``not expected``.

    ``class`` names the class that a target's name leads to, where that is another than vLLM's.
    """
    vllm = importlib.import_module("vllm")
    version = str(getattr(vllm, "__version__", ""))
    known = set(expected(version))
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
        row["state"] = "found" if has_it else "missing" if target in known else "not expected"
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
    # vLLM's own lines go to stderr or stdout as it pleases: only the last line is ours.
    told = probe()
    sys.stdout.flush()
    os.write(1, b"\n" + json.dumps(told).encode() + b"\n")
