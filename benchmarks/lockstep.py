# SPDX-License-Identifier: Apache-2.0
"""Two schedulers under the same load, step by step in turn, so that the machine's drift hits both.

The load is deterministic: step N does the same work on both sides and in every run. So of each
step the fastest time of a side counts, over all runs, and the sums of these are compared.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import no_collection
from benchmarks.result import BenchmarkError
from tests.support.scheduler import RequestMaker, answer, build_scheduler, tokens

SHARED_TOKENS = 256


@dataclass(frozen=True)
class Load:
    """Requests that share their first 256 tokens, all there from the start."""

    requests: int
    running: int
    """At once, at most."""
    blocks: int
    """Of 16 tokens, in the pool."""
    prompt: int | None = None
    """Tokens of each prompt; None for 256 and up to 512 of its own."""
    output: int = 200
    """The most that a request generates, in tokens."""

    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each request's own prompt and of its output."""
        chosen = random.Random(1)
        return [
            (
                self.prompt - SHARED_TOKENS if self.prompt else chosen.randint(1, 512),
                chosen.randint(1, self.output),
            )
            for _ in range(self.requests)
        ]


@dataclass(frozen=True)
class Side:
    """One of two schedulers: what it is made with, and how to check that it was at work.

    ``check`` gets the scheduler's number of steps and what ``collect`` returned for the outputs
    of each step, once the scheduler has ended; it raises BenchmarkError, or returns nanoseconds of
    processor time that were taken beside the steps, by a thread of the same process.
    """

    name: str
    profiling: bool = False
    engine_args: Callable[[], dict[str, Any]] = dict
    collect: Callable[[Any], int] = lambda outputs: 0
    check: Callable[[int, int], int] = lambda steps, collected: 0
    begin: Callable[[Any], None] = lambda scheduler: None
    end: Callable[[Any], None] = lambda scheduler: None


@dataclass
class Times:
    """Nanoseconds that one side took, a list for each run."""

    steps: list[list[int]] = field(default_factory=list)
    """schedule() and update_from_output() of each step."""
    adds: list[list[int]] = field(default_factory=list)
    """add_request() of each request."""
    beside: list[int] = field(default_factory=list)
    """What was taken beside the steps of a whole run: a figure for each, no list."""


def compare(
    model: Path,
    load: Load,
    sides: tuple[Side, Side],
    runs: int,
    seed: int,
    *,
    in_lockstep: bool = True,
) -> tuple[Times, Times]:
    """Run both sides so many times; which of them goes first is drawn anew each time.

    Where they are not in lockstep, each run is one scheduler's alone: the machine's drift lies
    between the sides, and the other one's steps no longer empty the processor's caches.

    Raises:
        BenchmarkError: the sides did not do the same work, or one of them was not at work.

    """
    draw = random.Random(seed)
    prompts = [
        (tokens(0, SHARED_TOKENS) + tokens(number + 1, own), output)
        for number, (own, output) in enumerate(load.lengths())
    ]
    times = (Times(), Times())
    for _ in range(runs):
        order = [0, 1]
        draw.shuffle(order)
        groups = [order] if in_lockstep else [[index] for index in order]
        work: dict[int, list[int]] = {}
        for group in groups:
            work |= _run(model, load, prompts, sides, times, group, draw)
        if work[0] != work[1]:
            raise BenchmarkError(
                "the two sides did not schedule the same: the instrument changed what vLLM does"
            )
    return times


def floor(runs: list[list[int]]) -> int:
    """The sum of each step's fastest time over all runs, in nanoseconds."""
    return sum(map(min, zip(*runs, strict=True)))


def _run(
    model: Path,
    load: Load,
    prompts: list[tuple[list[int], int]],
    sides: tuple[Side, Side],
    times: tuple[Times, Times],
    order: list[int],
    draw: random.Random,
) -> dict[int, list[int]]:
    """Run these sides, each step in turn; returns the tokens of their steps."""
    schedulers = {index: build(model, load, sides[index]) for index in order}
    for index in order:
        sides[index].begin(schedulers[index])
    with no_collection():
        adds = _add(schedulers, prompts, order, draw)
    with no_collection():
        steps, work, collected = _step(schedulers, sides, order, draw)
    for index in order:
        sides[index].end(schedulers[index])
    # What is recorded ends with its scheduler, which is part of cycles.
    schedulers.clear()
    gc.collect()
    for index in sorted(order):
        times[index].adds.append(adds[index])
        times[index].steps.append(steps[index])
        times[index].beside.append(sides[index].check(len(steps[index]), collected[index]))
    return work


def build(model: Path, load: Load, side: Side) -> Any:
    os.environ["VLLM_PROFILING"] = str(int(side.profiling))
    os.environ.pop("VLLM_PROFILING_SESSION", None)
    longest = max(own + output for own, output in load.lengths()) + SHARED_TOKENS
    return build_scheduler(
        model,
        load.blocks,
        max_num_seqs=load.running,
        max_model_len=max(8192, longest + 1),
        max_num_batched_tokens=8192,
        **side.engine_args(),
    )


def _add(
    schedulers: dict[int, Any],
    prompts: list[tuple[list[int], int]],
    order: list[int],
    draw: random.Random,
) -> dict[int, list[int]]:
    """Add each request to all of them; returns the times."""
    now = time.perf_counter_ns
    make = RequestMaker()
    times: dict[int, list[int]] = {index: [] for index in order}
    for number, (prompt, output) in enumerate(prompts):
        draw.shuffle(order)
        for index in order:
            request = make(f"request-{number}", prompt, output)
            began = now()
            schedulers[index].add_request(request)
            times[index].append(now() - began)
    return times


def _step(
    schedulers: dict[int, Any], sides: tuple[Side, Side], order: list[int], draw: random.Random
) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, int]]:
    """Step all to the end; returns the times and the tokens of each step, and what the sides
    collected."""
    now = time.perf_counter_ns
    times: dict[int, list[int]] = {index: [] for index in order}
    work: dict[int, list[int]] = {index: [] for index in order}
    collected = dict.fromkeys(order, 0)
    while schedulers[order[0]].has_unfinished_requests():
        draw.shuffle(order)
        for index in order:
            scheduler = schedulers[index]
            began = now()
            output = scheduler.schedule()
            scheduled = now()
            result = answer(scheduler, output)
            resumed = now()
            outputs = scheduler.update_from_output(output, result)
            times[index].append(now() - resumed + scheduled - began)
            collected[index] += sides[index].collect(outputs)
            work[index].append(output.total_num_scheduled_tokens)
    return times, work, collected
