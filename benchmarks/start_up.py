# SPDX-License-Identifier: Apache-2.0
"""What a Python process notices that never imports vLLM: python -m benchmarks.start_up

Starts `python -c pass` many times, with the repository on PYTHONPATH and without, in turn, from
start to end. The difference of the fastest starts counts, and the median of the paired
differences is shown beside it. The whole is repeated for its spread. Then the modules that the
two have loaded are compared: ours aside, there must be none that the other does not have.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import environment
from benchmarks.command import Options, count, progress, run
from benchmarks.result import Result, Target, middle

TIME = Target(1.0)
MODULES = Target(0)

OURS = {"sitecustomize", "profilemate", "profilemate.bootstrap"}
"""What is loaded of this repository."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=count, default=200, help="with and without, each (200)")
    parser.add_argument("--repeats", type=count, default=5, help="of the whole comparison (5)")


def measure(options: Options) -> list[Result]:
    """Milliseconds, and the number of foreign modules."""
    with tempfile.TemporaryDirectory() as folder:
        fastest, medians = [], []
        for number in range(options.repeats):
            least, median = compare(folder, options.starts, random.Random(number))
            progress(f"{number + 1} of {options.repeats}: {least:+.2f} ms, median {median:+.2f} ms")
            fastest.append(least)
            medians.append(median)
        foreign = loaded(folder, with_us()) - loaded(folder, without_us()) - OURS
    note = f"fastest of {options.starts}; median {statistics.median(medians):+.2f} ms"
    names = ", ".join(sorted(foreign)) or "none beyond what Python itself loads"
    found = float(len(foreign))
    return [
        middle("interpreter start", fastest, "ms", TIME, note),
        Result("interpreter start: imports", found, found, found, "modules", MODULES, names),
    ]


def without_us() -> dict[str, str]:
    """A shell without the repository, whose Python keeps its bytecode as it does by default."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") and not name.startswith("VLLM_")
    }


def with_us() -> dict[str, str]:
    """The same with it."""
    return {**without_us(), "PYTHONPATH": str(environment.ROOT)}


def compare(folder: str, starts: int, draw: random.Random) -> tuple[float, float]:
    """Milliseconds that starts take longer: the fastest, and the median of the pairs."""
    sides = [without_us(), with_us()]
    for side in sides:
        start(folder, side)
    times: list[list[float]] = [[], []]
    order = [0, 1]
    for _ in range(starts):
        draw.shuffle(order)
        for index in order:
            times[index].append(start(folder, sides[index]))
    without, with_it = times
    pairs = [after - before for before, after in zip(without, with_it, strict=True)]
    return min(with_it) - min(without), statistics.median(pairs)


def start(folder: str, environ: Mapping[str, str]) -> float:
    """Milliseconds from the start of an interpreter to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], cwd=folder, env=environ, check=True)
    return 1e3 * (time.perf_counter() - began)


def loaded(folder: str, environ: Mapping[str, str]) -> set[str]:
    """The modules that an interpreter has loaded when it is ready."""
    listing = "import sys; print(*sys.modules, sep='\\n')"
    command = [sys.executable, "-c", listing]
    return set(subprocess.check_output(command, cwd=Path(folder), env=environ, text=True).split())


if __name__ == "__main__":
    run(__doc__, add_options, measure)
