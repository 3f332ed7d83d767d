# SPDX-License-Identifier: Apache-2.0
"""Whether the engine's memory stays flat: python -m benchmarks.engine_memory

vLLM's real scheduler is driven through many short requests in a process of its own, with and
without recording, in turn. Each time all requests so far have ended, the process reports its
resident memory and how many objects Python has allocated. What memory grew by between the first
quarter and the end, a request, with recording less without, is what counts. The pool is small,
so that all of its blocks have been used many times over in the first quarter.

  python -m benchmarks.engine_memory --requests 10e6     a simulated day, which takes hours
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import environment, sessions
from benchmarks.command import Options, count, progress, run
from benchmarks.result import BenchmarkError, Result, Target, middle

TARGET = Target(1.0, words="flat: ≤ 1 byte/request (10 MB over 10 million)")


@dataclass(frozen=True)
class Growth:
    """What one run's memory grew by, a request."""

    resident: float
    """Bytes."""
    allocations: float
    """Python's allocated objects."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=count, default=100_000, help="(100,000)")
    parser.add_argument("--repeats", type=count, default=3, help="with and without, each (3)")


def measure(options: Options) -> list[Result]:
    """Bytes a request that recording adds."""
    environment.need_vllm()
    added, objects = [], []
    for number in range(options.repeats):
        off, on = (grow(options.requests, profiling=profiling) for profiling in (False, True))
        progress(
            f"{number + 1} of {options.repeats}: {off.resident:+.2f} bytes a request without, "
            f"{on.resident:+.2f} with; {off.allocations:+.4f} and {on.allocations:+.4f} objects"
        )
        added.append(on.resident - off.resident)
        objects.append(on.allocations - off.allocations)
    note = f"{max(objects):+.4f} Python objects/request at most; {options.requests:,} requests"
    return [middle("engine memory", added, "bytes/request", TARGET, note)]


def grow(requests: int, *, profiling: bool) -> Growth:
    """Drive so many requests; returns what memory grew by after the first quarter of them."""
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "sessions")
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.driver", "requests", f"--requests={requests}"],
            cwd=environment.ROOT,
            env=environment.variables(base, profiling=profiling),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            raise BenchmarkError(f"the driver ended with status {ended.returncode}")
        if profiling:
            sessions.wait_until_complete(sessions.only(base))
    samples = [json.loads(line) for line in ended.stdout.splitlines()]
    early, late = samples[len(samples) // 4], samples[-1]
    between = late["requests"] - early["requests"]
    return Growth(
        (late["resident"] - early["resident"]) / between,
        (late["allocations"] - early["allocations"]) / between,
    )


if __name__ == "__main__":
    run(__doc__, add_options, measure)
