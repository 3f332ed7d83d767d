# SPDX-License-Identifier: Apache-2.0
"""How long the engine stands still when a paused recording goes on: python -m benchmarks.resuming

vLLM's real scheduler and block pool run without a model until their pool is full of contents. Then
the recording is paused and goes on, again and again: of each time, the step that notes how the
blocks stand is compared with the one after it.

  python -m benchmarks.resuming                    pools of 10,000 and 100,000 blocks
  python -m benchmarks.resuming --blocks 1000000   another one
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import environment
from benchmarks.command import Options, count, run
from benchmarks.environment import no_collection
from benchmarks.result import Result, middle
from profilemate.record import recorder
from tests.support.scheduler import (
    RequestMaker,
    answer,
    build_scheduler,
    tokens,
    write_model,
)

RUNNING = 128
PROMPT = 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=count, help="in the pool (10,000 and 100,000)")
    parser.add_argument("--times", type=count, default=9, help="that the recording goes on (9)")


def measure(options: Options) -> list[Result]:
    """Milliseconds that the step takes longer in which the recording goes on."""
    environment.attach_hooks()
    sizes = [options.blocks] if options.blocks else [10_000, 100_000]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VLLM_PROFILING_DIR"] = f"{scratch}/sessions"
        model = write_model(Path(scratch, "model"))
        return [_measure(model, blocks, options.times) for blocks in sizes]


def _measure(model: Path, blocks: int, times: int) -> Result:
    os.environ.pop("VLLM_PROFILING_SESSION", None)
    scheduler = build_scheduler(
        model,
        blocks,
        max_num_seqs=RUNNING,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    )
    make = RequestMaker()
    for number in range(blocks * 16 // PROMPT + RUNNING):
        output = 4 if number * PROMPT < blocks * 16 else 3000
        scheduler.add_request(make(f"request-{number}", tokens(number, PROMPT), output))
    while scheduler.waiting:
        _step(scheduler)
    (recording,) = recorder._living()
    longer = []
    with no_collection():
        for _ in range(times):
            recording.wants_pause = True
            _step(scheduler)
            recording.wants_pause = False
            going_on = _step(scheduler)
            after = min(_step(scheduler) for _ in range(5))
            longer.append((going_on - after) / 1e6)
            recording.flush()
    pool = scheduler.kv_cache_manager.block_pool
    cached = sum(block.block_hash is not None for block in pool.blocks)
    note = f"{cached:,} of them with contents, {len(scheduler.running)} requests running"
    return middle(f"the halt with {blocks:,} blocks", [median(longer), *longer], "ms", None, note)


def _step(scheduler: Any) -> int:
    """A step; returns the nanoseconds that schedule() took."""
    began = time.perf_counter_ns()
    output = scheduler.schedule()
    took = time.perf_counter_ns() - began
    scheduler.update_from_output(output, answer(scheduler, output))
    return took


if __name__ == "__main__":
    run(__doc__, add_options, measure)
