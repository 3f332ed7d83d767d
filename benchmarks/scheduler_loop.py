# SPDX-License-Identifier: Apache-2.0
"""What recording costs the scheduler's loop: ``python -m benchmarks.scheduler_loop``.

The workload is deterministic, so the same step does the same work in every run. Runs with the
hooks on and off take turns inside one process; of each step the fastest time over all runs of a
kind counts, and the sums are compared. The whole is repeated for its spread. Times are the
engine thread's CPU time, user and system, which a busy machine disturbs least; ``--wall`` takes
the clock on the wall instead.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.scheduler import RequestMaker, answer, build_scheduler, tokens, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--running", type=int, default=128, help="max_num_seqs")
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=12, help="runs with and without, each")
    parser.add_argument("--repeats", type=int, default=3, help="of the whole comparison")
    parser.add_argument("--wall", action="store_true", help="wall time, not CPU time")
    parser.add_argument("--null", action="store_true", help="compare off with off: the noise")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VLLM_PROFILING_DIR"] = f"{scratch}/sessions"
        # Hooks wait for vLLM only where profiling is on as it is imported.
        os.environ["VLLM_PROFILING"] = "1"
        importlib.import_module("vllm.v1.core.sched.scheduler")
        model = write_model(Path(scratch, "model"))
        changes = [compare(model, options) for _ in range(options.repeats)]
    print(
        f"scheduler loop, {options.running} running: {statistics.median(changes):+.2f} % "
        f"(from {min(changes):+.2f} to {max(changes):+.2f} over {len(changes)} comparisons)"
    )


def compare(model: Path, options: argparse.Namespace) -> float:
    """Change of the summed fastest step times with recording on, in per cent."""
    off: list[list[int]] = []
    on: list[list[int]] = []
    for number in range(2 * options.runs):
        recording = bool(number % 2)
        times = run(model, options, recording and not options.null)
        (on if recording else off).append(times)
    if not options.null and not list(Path(os.environ["VLLM_PROFILING_DIR"]).glob("session_*")):
        sys.exit("nothing was recorded: is this repository on PYTHONPATH?")
    floor_off, floor_on = floor(off), floor(on)
    steps = len(off[0])
    change = 100 * (floor_on / floor_off - 1)
    print(
        f"{steps} steps: {floor_off / steps / 1e3:.1f} us a step without, "
        f"{(floor_on - floor_off) / steps / 1e3:+.1f} us with ({change:+.2f} %)",
        flush=True,
    )
    return change


def floor(runs: list[list[int]]) -> int:
    """The sum of each step's fastest time over all runs, in nanoseconds."""
    return sum(map(min, zip(*runs, strict=True)))


def run(model: Path, options: argparse.Namespace, recording: bool) -> list[int]:
    """Time of each step (both of the scheduler's calls), in nanoseconds."""
    os.environ["VLLM_PROFILING"] = "1" if recording else "0"
    os.environ.pop("VLLM_PROFILING_SESSION", None)
    scheduler = build_scheduler(model, options.blocks, max_num_seqs=options.running)
    for request in workload(options.requests):
        scheduler.add_request(request)
    gc.collect()
    gc.disable()
    times = []
    now = time.perf_counter_ns if options.wall else time.thread_time_ns
    while scheduler.has_unfinished_requests():
        began = now()
        output = scheduler.schedule()
        scheduled = now()
        result = answer(scheduler, output)
        resumed = now()
        scheduler.update_from_output(output, result)
        times.append(now() - resumed + scheduled - began)
    gc.enable()
    return times


def workload(count: int) -> list[Any]:
    """Requests with 256 shared and up to 512 own tokens, and up to 200 of output."""
    make = RequestMaker()
    lengths = random.Random(1)
    shared = tokens(0, 256)
    return [
        make(
            f"request-{number}",
            shared + tokens(number + 1, lengths.randint(1, 512)),
            lengths.randint(1, 200),
        )
        for number in range(count)
    ]


if __name__ == "__main__":
    main()
