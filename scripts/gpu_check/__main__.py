# SPDX-License-Identifier: Apache-2.0
"""Check on this machine's GPU what profilemate records of CUDA graphs, and what that costs.

    python -m scripts.gpu_check [--no-engine] [--keep FOLDER]

Needs torch with CUDA, wrapt and orjson, no network, and less than six minutes. Where vLLM can be
imported, its real CUDAGraphWrapper captures too, and a whole engine with a tiny model of random
weights is profiled; the analyzer answers where polars is there. Exit status: 0 all is well,
1 something is not, 2 there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import tempfile
import time
from pathlib import Path

from .report import Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--no-engine", action="store_true", help="leave out the whole engine")
    parser.add_argument("--keep", type=Path, help="put the journals and the session here")
    options = parser.parse_args()
    missing = [name for name in ("torch", "wrapt", "orjson") if not importlib.util.find_spec(name)]
    if missing:
        print(f"gpu_check: {' and '.join(missing)} not found: install it first", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return _check(folder.resolve(), engine=not options.no_engine)


def _check(folder: Path, *, engine: bool) -> int:
    import torch

    from . import alone, costs, whole_engine, wrapper

    began = time.monotonic()
    report = Report()
    free, total = torch.cuda.mem_get_info()
    report.note("GPU", f"{torch.cuda.get_device_name()}, {free >> 20} of {total >> 20} MiB free")
    report.note("Python", f"{platform.python_version()}, torch {torch.__version__}")

    report.title("CUDA graphs, the hooks alone")
    alone.check_counts(report, folder)
    alone.check_times(report, folder)
    report.title("What it costs the host")
    costs.measure(report, folder)
    if importlib.util.find_spec("vllm") is None:
        report.note("vLLM", "not installed: its wrapper and a whole engine are left out")
    else:
        report.title("vLLM's CUDAGraphWrapper")
        wrapper.check(report, folder)
        if engine:
            report.title("A whole engine")
            whole_engine.check(report, folder)
    print()
    report.note("Took", f"{time.monotonic() - began:.0f} s")
    print("GPU CHECK FAILED" if report.failed else "GPU CHECK OK", flush=True)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
