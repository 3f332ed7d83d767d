# SPDX-License-Identifier: Apache-2.0
"""What recording costs the scheduler's loop: python -m benchmarks.scheduler_loop

vLLM's real scheduler, KV cache manager and block pool run without a model, all of it recorded and
flushed, with the collector at work beside them. One scheduler is recorded and one is not; they
take each step in turn inside one process. Of each step, schedule() and update_from_output(), the
fastest time over all runs counts, and the sums are compared. What the thread takes that packs and
writes is added to that, in processor time (the median of the runs), though it works while an engine
waits for its model. The whole is repeated for its spread.

  python -m benchmarks.scheduler_loop                      128 running requests
  python -m benchmarks.scheduler_loop --running 1024       1,024 running requests
  python -m benchmarks.scheduler_loop --prompt 100000      prompts of 100,000 tokens, in chunks
  python -m benchmarks.scheduler_loop --alone              each run one scheduler's, on and off in
                                                           turn: both find warmer caches
  python -m benchmarks.scheduler_loop --null               off against off: the noise
  python -m benchmarks.scheduler_loop --paused             while the recording is paused
  python -m benchmarks.scheduler_loop --vllm-metrics 0.01  vLLM's own collector at its 1 % sample
  python -m benchmarks.scheduler_loop --vllm-events        vLLM's KV events, published by ZeroMQ
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import environment, sessions
from benchmarks.command import Options, count, progress, run
from benchmarks.lockstep import SHARED_TOKENS, Load, Side, Times, compare, floor
from benchmarks.result import BenchmarkError, Result, Target, middle
from profilemate.format import control
from profilemate.format.folder import Folder
from profilemate.format.session import JOURNAL_FOLDER
from profilemate.record import recorder
from tests.support.scheduler import write_model

TARGET = Target(1.5)

OFF = Side("off")


def add_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--running", type=count, help="requests running at once (128; 8 if --prompt)")
    load.add_argument("--requests", type=count, help="in all (600, or twice the running ones)")
    load.add_argument("--blocks", type=count, help="of 16 tokens in the pool (enough for most)")
    load.add_argument("--prompt", type=count, help="tokens of each prompt (257 to 768)")
    load.add_argument("--output", type=count, default=200, help="tokens generated at most (200)")
    parser.add_argument("--alone", action="store_true", help="each run one scheduler's")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--null", action="store_true", help="compare off with off")
    instead.add_argument("--paused", action="store_true", help="while the recording is paused")
    instead.add_argument(
        "--vllm-metrics", type=float, metavar="SAMPLE", help="compare vLLM's KV cache metrics"
    )
    instead.add_argument("--vllm-events", action="store_true", help="compare vLLM's KV events")
    parser.add_argument("--runs", type=count, default=12, help="of both sides (12)")
    parser.add_argument("--repeats", type=count, default=3, help="of the whole comparison (3)")


def measure(options: Options) -> list[Result]:
    """Change of the summed fastest step times, and with the thread that writes, in per cent."""
    environment.attach_hooks()
    load, side = chosen_load(options), chosen_side(options)
    found: list[tuple[float, float, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VLLM_PROFILING_DIR"] = f"{scratch}/sessions"
        model = write_model(Path(scratch, "model"))
        for number in range(options.repeats):
            off, on = compare(
                model,
                load,
                (OFF, side),
                options.runs,
                seed=number,
                in_lockstep=not options.alone,
            )
            whole, steps, note = describe(off, on)
            progress(f"{number + 1} of {options.repeats}: {whole:+.2f} %, {note}")
            found.append((whole, steps, note))
    name, note = name_of(load, side), sorted(found)[len(found) // 2][2]
    if options.alone:
        name += ", alone"
    if not side.profiling or options.paused:
        return [middle(name, [whole for whole, _, _ in found], "%", None, note)]
    return [
        middle(name, [whole for whole, _, _ in found], "%", TARGET, note),
        middle(f"{name}: the steps alone", [steps for _, steps, _ in found], "%", None, note),
    ]


def chosen_load(options: Options) -> Load:
    prompt = options.prompt
    if prompt is not None and prompt <= SHARED_TOKENS:
        raise BenchmarkError(f"--prompt has to be more than the {SHARED_TOKENS} shared tokens")
    running = options.running or (8 if prompt else 128)
    requests = options.requests or (3 * running if prompt else max(600, 2 * running))
    # Room for about as many as run, so that cached blocks are evicted and some requests wait.
    blocks = options.blocks or (running * (prompt // 16 + 16) if prompt else 32 * running)
    return Load(requests, running, blocks, prompt, options.output)


def chosen_side(options: Options) -> Side:
    if options.null:
        return Side("off again")
    if options.paused:
        return Side("paused", profiling=True, begin=pause, check=check_pause)
    if options.vllm_metrics is not None:
        return vllm_metrics(options.vllm_metrics)
    if options.vllm_events:
        return vllm_events()
    return Side("on", profiling=True, check=check_session)


def name_of(load: Load, side: Side) -> str:
    what = f"{load.prompt:,}-token prompts" if load.prompt else f"{load.running:,} running"
    return f"scheduler loop, {what}" + ("" if side.name == "on" else f": {side.name}")


def describe(off: Times, on: Times) -> tuple[float, float, str]:
    """The change in per cent with what was taken beside the steps, that of the steps alone, and
    the figures behind them."""
    steps, requests = len(off.steps[0]), len(off.adds[0])
    without, more = floor(off.steps), floor(on.steps) - floor(off.steps)
    beside = median(on.beside)
    add, more_add = floor(off.adds), floor(on.adds) - floor(off.adds)
    note = (
        f"{steps} steps of {without / steps / 1e3:,.0f} µs, {more / steps / 1e3:+.1f} µs a step "
        f"and {beside / steps / 1e3:.1f} µs in another thread; add_request "
        f"{add / requests / 1e3:.1f} µs, {more_add / requests / 1e3:+.1f} µs a request"
    )
    return 100 * (more + beside) / without, 100 * more / without, note


def check_session(steps: int, _collected: int) -> int:
    """Every step is in the one session that there is, which is removed; returns the processor time
    of the thread that wrote it."""
    session = sessions.only(Path(os.environ["VLLM_PROFILING_DIR"]))
    writing_sec: float = sessions.wait_until_complete(session)["cost"]["writing_sec"]
    sessions.check_steps(session, steps)
    shutil.rmtree(session)
    return round(1e9 * writing_sec)


def pause(_scheduler: Any) -> None:
    """Have the recording paused from the first step on."""
    session = sessions.only(Path(os.environ["VLLM_PROFILING_DIR"]))
    with Folder.own(session / JOURNAL_FOLDER) as journals:
        control.ask(journals, paused=True)
    for recording in recorder._living():
        recording.wants_pause = True


def check_pause(_steps: int, _collected: int) -> int:
    """One step was recorded, and then nothing; returns the processor time of the thread."""
    session = sessions.only(Path(os.environ["VLLM_PROFILING_DIR"]))
    known = sessions.wait_until_complete(session)
    sessions.check_steps(session, 1)
    ((_, end),) = known["processes"][0]["pauses"]
    if end is not None:
        raise BenchmarkError("the recording went on")
    shutil.rmtree(session)
    writing_sec: float = known["cost"]["writing_sec"]
    return round(1e9 * writing_sec)


def vllm_metrics(sample: float) -> Side:
    """vLLM's own instrument, --kv-cache-metrics, which looks at a sample of the blocks."""

    def collect(outputs: dict[int, Any]) -> int:
        stats = [output.scheduler_stats for output in outputs.values()]
        return sum(len(known.kv_cache_eviction_events) for known in stats if known)

    def check(steps: int, collected: int) -> int:
        if not collected:
            raise BenchmarkError(f"vLLM's collector saw no eviction in {steps} steps")
        return 0

    return Side(
        f"vLLM's own metrics, sample {100 * sample:g} %",
        engine_args=lambda: {"kv_cache_metrics": True, "kv_cache_metrics_sample": sample},
        collect=collect,
        check=check,
    )


def vllm_events() -> Side:
    """vLLM's KV events, as a router subscribes to them; nobody does here."""
    numbers = itertools.count()

    def engine_args() -> dict[str, Any]:
        from vllm.config import KVEventsConfig

        endpoint = f"inproc://kv-events-{next(numbers)}"
        return {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)}

    def end(scheduler: Any) -> None:
        publisher = scheduler.kv_event_publisher
        publisher.shutdown()
        if not getattr(publisher, "_buffer", None):
            raise BenchmarkError("vLLM published no KV event")

    return Side("vLLM's own KV events", engine_args=engine_args, end=end)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
