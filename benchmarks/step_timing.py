# SPDX-License-Identifier: Apache-2.0
"""What timing steps by phase adds to a step: python -m benchmarks.step_timing

vLLM's scheduler schedules a load once. Then a model runner that computes nothing is given its steps
again and again, with them timed and not, in pairs of batches whose order is drawn; the median of
the differences counts. What stands in for CUDA events does nothing. So this is what the hooks, the
counting of tokens and the journal cost the worker's thread; what the driver takes for the four
events of a step comes on top of it.

  python -m benchmarks.step_timing                  64 running requests
  python -m benchmarks.step_timing --running 1024   as many as that
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import environment
from benchmarks.command import Options, count, progress, run
from benchmarks.pairs import compare, note
from benchmarks.result import BenchmarkError, Result, middle
from profilemate.hooks.gpu import phases
from profilemate.hooks.gpu.graphs import Graphs
from profilemate.record.recorder import Recorder

PROMPT, OUTPUT = 200, 50


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=count, default=64, help="requests that run (64)")
    parser.add_argument("--pairs", type=count, default=40, help="of batches in a repeat (40)")
    parser.add_argument("--repeats", type=count, default=5, help="of the comparison (5)")


class _Event:
    """In place of a CUDA event: it has passed as soon as it is recorded."""

    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


_CUDA = SimpleNamespace(Event=_Event, is_current_stream_capturing=lambda: False)


class _Worker:
    """A worker and its runner in one, which compute nothing."""

    def __init__(self) -> None:
        self.model_runner = self

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> None: ...

    def _execute_mm_encoder(self, scheduler_output: Any) -> None: ...


def measure(options: Options) -> list[Result]:
    """Microseconds that timing adds to a step."""
    environment.need_vllm()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        steps = _steps(folder / "model", options.running)
        progress(f"{len(steps):,} steps in a batch")
        sides = [partial(_run, steps), partial(_timed, steps, folder), partial(_run, steps)]
        found = [compare(sides, options.pairs, len(steps), seed) for seed in range(options.repeats)]
        return [
            middle(name, [times[place].added for times in found], "µs", None, _note(found, place))
            for place, name in enumerate(("steps timed by phase", "off against off"))
        ]


def _note(found: Sequence[Any], place: int) -> str:
    return note([times[place] for times in found], "a step without a model")


def _steps(model: Path, running: int) -> list[Any]:
    """What the scheduler says of each step of a load: prompts in chunks, then answers."""
    from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens, write_model

    scheduler = build_scheduler(
        write_model(model), 40 * running, max_num_seqs=running, max_num_batched_tokens=2048
    )
    make = RequestMaker()
    for number in range(2 * running):
        scheduler.add_request(make(f"request {number}", tokens(number, PROMPT), OUTPUT))
    steps = []
    while scheduler.has_unfinished_requests():
        steps.append(step(scheduler))
    return steps


def _run(steps: Sequence[Any], worker: _Worker | None = None) -> int:
    """Nanoseconds of processor time of this thread for these steps."""
    runner = (worker or _Worker()).model_runner
    began = time.thread_time_ns()
    for output in steps:
        runner.execute_model(output)
        runner.sample_tokens(None)
    return time.thread_time_ns() - began


def _timed(steps: Sequence[Any], folder: Path) -> int:
    journal = folder / "worker0.journal"
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    recorder = Recorder(fd, {"producer": "worker", "rank": 0}, "worker 0", path=journal)
    worker = _Worker()
    timed = phases.watch(worker, Graphs(recorder, None), _CUDA)
    took = _run(steps, worker)
    if timed.part.lost:
        raise BenchmarkError("the timing has ended")
    timed.close()
    recorder.close()
    if not journal.stat().st_size:
        raise BenchmarkError("nothing was recorded")
    return took


if __name__ == "__main__":
    run(__doc__, add_options, measure)
