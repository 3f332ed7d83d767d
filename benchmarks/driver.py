# SPDX-License-Identifier: Apache-2.0
"""Drive vLLM's scheduler in a process of its own, as benchmarks ask for it.

    python -m benchmarks.driver trace FOLDER    record the trace, and keep the journals
    python -m benchmarks.driver requests        many short requests; memory, a line of JSON each
    python -m benchmarks.driver paced           so many steps a second; what came of it as JSON
    python -m benchmarks.driver long            prompts that are all new, in a pool too small for
                                                them; what the pool itself did as JSON
    python -m benchmarks.driver replay TRACE    a trace over and over, in its own lengths; what the
                                                pool itself did so far, a line of JSON now and then

Whether it records is up to the environment, as it is for vLLM.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import count
from tests.support.scheduler import (
    RequestMaker,
    build_scheduler,
    drive,
    step,
    tokens,
    trace_requests,
    write_model,
)

SAMPLES = 16

RUNNING = 128
"""Requests at once, at most."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    trace = commands.add_parser("trace")
    trace.add_argument("folder", type=Path, help="each copy of the session becomes FOLDER/N")
    trace.add_argument("--passes", type=count, nargs="+", default=[1], help="copy after each N")
    trace.add_argument("--blocks", type=count, default=1_000)
    trace.set_defaults(run=record_trace)
    requests = commands.add_parser("requests")
    requests.add_argument("--requests", type=count, default=50_000)
    requests.set_defaults(run=many_requests)
    paced = commands.add_parser("paced")
    paced.add_argument("--rate", type=count, default=5_000, help="steps a second")
    paced.add_argument("--seconds", type=float, default=20)
    paced.set_defaults(run=paced_steps)
    long = commands.add_parser("long")
    long.add_argument("--events", type=float, default=1e6, help="of blocks, in all")
    long.add_argument("--rate", type=float, default=150_000, help="of them a second, at most")
    long.add_argument("--blocks", type=count, default=4_000, help="of the pool")
    long.set_defaults(run=long_run)
    replay = commands.add_parser("replay")
    replay.add_argument("trace", type=Path, help="JSON lines, as Mooncake's")
    replay.add_argument("--hours", type=float, default=1, help="of the trace's own time")
    replay.add_argument("--minutes", type=float, default=1e9, help="of real time, at most")
    replay.add_argument("--rate", type=float, default=1e9, help="block events a second, at most")
    replay.add_argument("--blocks", type=count, default=60_000, help="of the pool")
    replay.set_defaults(run=replay_trace)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options.run(write_model(Path(scratch)), options)


class FreshMaker(RequestMaker):
    """Makes the trace's requests with contents that no other pass through the trace has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._mark = [3 + digit for digit in divmod(number, 250)]

    def __call__(self, request_id: str, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
        # These two tokens are a function of the first four; a prompt that has them starts anew.
        marked = [*prompt[:4], *self._mark, *prompt[6:]][: len(prompt)]
        return super().__call__(f"{self._mark}-{request_id}", marked, max_tokens, **fields)


def record_trace(model: Path, options: argparse.Namespace) -> None:
    """Record the trace over and over, without a collector, which would remove the journals."""
    from profilemate.record import launch

    launch.start = lambda directory: None
    scheduler = build_scheduler(model, options.blocks)
    sessions = Path(os.environ["VLLM_PROFILING_DIR"])
    for number in range(1, max(options.passes) + 1):
        drive(scheduler, trace_requests(FreshMaker(number)))
        print(f"    recorded {number} of {max(options.passes)}", file=sys.stderr, flush=True)
        if number in options.passes:
            (session,) = sessions.glob("session_*")
            shutil.copytree(session, options.folder / str(number))


def many_requests(model: Path, options: argparse.Namespace) -> None:
    """Print the requests that have ended, resident memory and Python's objects, now and then."""
    scheduler = build_scheduler(model, 1_000, max_num_seqs=RUNNING)
    pending = short_requests(options.requests)
    batch = max(1, options.requests // SAMPLES)
    gc.collect()
    gc.freeze()  # Going through all that vLLM has loaded takes a second each time.
    for ended in range(batch, options.requests + 1, batch):
        for request in itertools.islice(pending, batch):
            scheduler.add_request(request)
            if len(scheduler.requests) >= 2 * RUNNING:
                # In batches: a step takes as long for one that ends as for all.
                while len(scheduler.requests) > RUNNING:
                    step(scheduler)
        while scheduler.has_unfinished_requests():
            step(scheduler)
        gc.collect()
        sample = {
            "requests": ended,
            "resident": resident(),
            "allocations": sys.getallocatedblocks(),
        }
        print(json.dumps(sample), flush=True)
    gc.unfreeze()


def short_requests(number: int) -> Iterator[Any]:
    """Requests of two full blocks, the first shared by every fourth, and four tokens of output."""
    make = RequestMaker()
    shared = [tokens(family, 16) for family in range(4)]
    for index in range(number):
        yield make(f"request-{index}", shared[index % 4] + tokens(index, 18), 4)


def resident() -> int:
    """Bytes of this process's own memory that are in RAM."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def paced_steps(model: Path, options: argparse.Namespace) -> None:
    """Run steps of one request at a steady rate, which is about as fast as a scheduler can be."""
    scheduler = build_scheduler(model, 1_000, max_num_seqs=1)
    steps = int(options.rate * options.seconds)
    make = RequestMaker()
    # Enough of them that one is always running; a block more every 16 steps, 15 less after 200.
    for number in range(steps // 200 + 2):
        scheduler.add_request(make(f"request-{number}", tokens(number, 40), 200))
    gc.collect()
    began = time.monotonic()
    for number in range(steps):
        early = began + number / options.rate - time.monotonic()
        if early > 0:
            time.sleep(early)
        step(scheduler)
    print(json.dumps({"steps": steps, "seconds": time.monotonic() - began}), flush=True)


@dataclass
class PoolCounts:
    """What block pools did, counted in their own methods, beneath the hooks."""

    allocated: int = 0
    evicted: int = 0
    cached: int = 0
    freed: int = 0
    reused: int = 0

    @property
    def events(self) -> int:
        return self.allocated + self.cached + self.freed + self.reused

    def watch(self, pool: Any) -> None:
        """Count from now on, in all pools of this class."""
        hand_out, evict, cache, free = (
            *(pool.get_new_blocks, pool._maybe_evict_cached_block),
            *(pool.cache_full_blocks, pool.free_blocks),
        )
        touch = pool.touch

        def get_new_blocks(this: Any, number: int) -> Any:
            self.allocated += number
            return hand_out(this, number)

        def maybe_evict(this: Any, block: Any) -> Any:
            is_evicted = evict(this, block)
            self.evicted += is_evicted
            return is_evicted

        def cache_full_blocks(this: Any, *args: Any, **kwargs: Any) -> Any:
            before = kwargs.get("num_cached_blocks", args[2] if len(args) > 2 else 0)
            after = kwargs.get("num_full_blocks", args[3] if len(args) > 3 else 0)
            self.cached += max(0, after - before)
            return cache(this, *args, **kwargs)

        def free_blocks(this: Any, blocks: Any, *args: Any, **kwargs: Any) -> Any:
            listed = list(blocks)
            self.freed += sum(block.ref_cnt == 1 for block in listed)
            return free(this, listed, *args, **kwargs)

        def touched(this: Any, blocks: Any, *args: Any, **kwargs: Any) -> Any:
            self.reused += len(blocks)
            return touch(this, blocks, *args, **kwargs)

        pool.touch = touched
        pool.get_new_blocks, pool._maybe_evict_cached_block = get_new_blocks, maybe_evict
        pool.cache_full_blocks, pool.free_blocks = cache_full_blocks, free_blocks


def long_run(model: Path, options: argparse.Namespace) -> None:
    """Prompts of 2,000 tokens, none like another, so that each block is evicted in its turn."""
    from vllm.v1.core.block_pool import BlockPool

    counts = PoolCounts()
    counts.watch(BlockPool)
    scheduler = build_scheduler(model, options.blocks)
    make = RequestMaker()
    began, number = time.monotonic(), 0
    gc.collect()
    gc.freeze()
    while counts.events < options.events:
        while len(scheduler.requests) < 2 * RUNNING // 16:
            number += 1
            # Requests of one number in 60,000 begin alike: far fewer of them fit the pool.
            mark = [3 + digit for digit in divmod(number % 60_000, 250)]
            prompt = [*mark, *tokens(number, 1_998)]
            scheduler.add_request(make(f"request-{number}", prompt, 4))
        step(scheduler)
        early = began + counts.events / options.rate - time.monotonic()
        if early > 0:
            time.sleep(early)
    while scheduler.has_unfinished_requests():
        step(scheduler)
    print(json.dumps({**vars(counts), "requests": number, "resident": resident()}), flush=True)


TRACE_BLOCK = 512
"""Tokens of a trace's block."""

STEP_MS = 30.0
"""Of the trace's time that a step takes."""

REPORT_MS = 600_000.0
"""Of the trace's time, between two lines."""


def replay_trace(model: Path, options: argparse.Namespace) -> None:
    """The trace at its own pace, in its own time, which passes as fast as steps can be taken."""
    from vllm.v1.core.block_pool import BlockPool

    counts = PoolCounts()
    counts.watch(BlockPool)
    scheduler = build_scheduler(
        model,
        options.blocks,
        max_num_seqs=256,
        max_model_len=131_072,
        max_num_batched_tokens=8_192,
    )
    arrivals = replayed(options.trace, options.hours * 3.6e6)
    began, clock_ms, next_report = time.monotonic(), 0.0, REPORT_MS
    gc.collect()
    gc.freeze()
    coming = next(arrivals, None)
    while coming or scheduler.has_unfinished_requests():
        if time.monotonic() - began > 60 * options.minutes:
            coming = None
        while coming and coming[0] <= clock_ms:
            scheduler.add_request(coming[1])
            coming = next(arrivals, None)
        if scheduler.has_unfinished_requests():
            step(scheduler)
        clock_ms += STEP_MS
        if clock_ms >= next_report:
            next_report += REPORT_MS
            report(counts, clock_ms)
        early = began + counts.events / options.rate - time.monotonic()
        if early > 0:
            time.sleep(early)
    report(counts, clock_ms)


def report(counts: PoolCounts, clock_ms: float) -> None:
    """A line of JSON."""
    so_far = {
        "hours": clock_ms / 3.6e6,
        "events": counts.events,
        **vars(counts),
        "resident": resident(),
        "allocations": sys.getallocatedblocks(),
    }
    print(json.dumps(so_far), flush=True)


def replayed(trace: Path, until_ms: float) -> Iterator[tuple[float, Any]]:
    """Arrival (ms) and request of the trace's lines, over and over until a time. No two passes
    have a content in common."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    period = rows[-1]["timestamp"] + 1_000
    make, filling = RequestMaker(), tokens(1, 2 * TRACE_BLOCK)
    for number in itertools.count():
        mark = [3 + digit for digit in divmod(number, 250)]
        for index, row in enumerate(rows):
            arrival = number * period + row["timestamp"]
            if arrival > until_ms:
                return
            prompt = list(mark)
            for block in row["hash_ids"]:
                # Four tokens have its number, so that no two are alike.
                prompt += [3 + (block >> 8 * digit) % 256 for digit in range(4)]
                begin = block % TRACE_BLOCK
                prompt += filling[begin : begin + TRACE_BLOCK - 4]
            prompt = prompt[: row["input_length"]]
            yield arrival, make(f"request-{number}-{index}", prompt, row["output_length"])


if __name__ == "__main__":
    main()
