# SPDX-License-Identifier: Apache-2.0
"""What each part of recording costs, beside the least it could: python -m benchmarks.parts

Inside the scheduler's loop, where what a hook needs has left the processor's caches: a call of
allocate_slots, recorded and not, with both schedulers taking each step in turn.

Alone, in loops of their own, where everything stays in the caches: a hook beside a closure that
only passes on, each further block of its call, and what the thread that writes does with an event,
a block id, a block hash and a step, beside a bare os.write of as many bytes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from benchmarks import environment, lockstep
from benchmarks.command import Options, count, progress, run
from benchmarks.lockstep import Load, Side
from benchmarks.pairs import Times, compare, note
from benchmarks.result import BenchmarkError, Result, middle
from profilemate.format.events import Columns, Op
from profilemate.hooks.instances import is_hook
from profilemate.record import encode
from profilemate.record import recorder as recording
from profilemate.record.encode import Event
from profilemate.record.recorder import Recorder
from tests.kv.recording import NoThread
from tests.support.scheduler import write_model

LOAD = Load(requests=600, running=128, blocks=4096)

CALLS = {1: 50, 257: 10}
"""Calls of get_new_blocks timed together, by the blocks that each asks for."""
PACKED = 1000
"""Events, ids or hashes that are packed together."""
STEP_EVENTS = 30
"""Events of a step that is written: about as many as 128 running requests make."""

BARE, RECORDED = Side("bare"), Side("recorded", profiling=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=count, default=12, help="of the scheduler's loop (12)")
    parser.add_argument("--pairs", type=count, default=300, help="of batches in a repeat (300)")
    parser.add_argument("--repeats", type=count, default=5, help="of what runs alone (5)")


def measure(options: Options) -> list[Result]:
    """Microseconds, or nanoseconds where it says so."""
    environment.attach_hooks()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VLLM_PROFILING_DIR"] = f"{scratch}/sessions"
        model = write_model(Path(scratch, "model"))
        found = in_the_loop(model, options)
        progress("the loop is done")
        found += hooks_alone(model, options)
        found += packing(model, options)
        found += writing(Path(scratch, "engine.journal"), options)
    return found


def in_the_loop(model: Path, options: Options) -> list[Result]:
    """What a call of allocate_slots takes longer where the pool is recorded."""
    with _timed_calls() as calls:
        lockstep.compare(model, LOAD, (BARE, RECORDED), options.runs, seed=1)
    bare, recorded = calls.fastest(recorded=False), calls.fastest(recorded=True)
    if len(bare) != len(recorded):
        raise BenchmarkError(f"{len(recorded)} calls are recorded, and {len(bare)} are not")
    quiet = [not handed_out for handed_out in calls.handed_out]
    chosen: dict[str, Sequence[bool]] = {
        "allocate_slots": [True] * len(bare),
        "allocate_slots that hands out blocks": calls.handed_out,
        "allocate_slots that hands out none": quiet,
    }
    return [_per_call(name, bare, recorded, which) for name, which in chosen.items()]


def _per_call(name: str, bare: list[int], recorded: list[int], which: Sequence[bool]) -> Result:
    number = sum(which)
    without = sum(compress(bare, which)) / number / 1e3
    more = sum(compress(recorded, which)) / number / 1e3 - without
    return middle(name, [more], "µs", None, f"on {without:.2f} µs, {number:,} calls")


class _Calls:
    """Nanoseconds of each call of allocate_slots, by scheduler in the order of their first ones,
    and which calls handed blocks out."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Any, bool, list[int]]] = {}
        self.handed_out: list[bool] = []

    def add(self, manager: Any, taken: int, blocks: Any) -> None:
        if id(manager) not in self._runs:
            is_recorded = is_hook(manager.block_pool.get_new_blocks)
            self._runs[id(manager)] = manager, is_recorded, []
        runs = self._runs[id(manager)][2]
        runs.append(taken)
        if len(self.handed_out) < len(runs):
            self.handed_out.append(bool(blocks and any(blocks.blocks)))

    def fastest(self, *, recorded: bool) -> list[int]:
        runs = [taken for _, is_recorded, taken in self._runs.values() if is_recorded == recorded]
        return list(map(min, zip(*runs, strict=True)))


@contextmanager
def _timed_calls() -> Iterator[_Calls]:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    original: Callable[..., Any] = KVCacheManager.allocate_slots
    calls, now = _Calls(), time.perf_counter_ns

    def allocate_slots(manager: Any, *args: Any, **kwargs: Any) -> Any:
        began = now()
        blocks = original(manager, *args, **kwargs)
        calls.add(manager, now() - began, blocks)
        return blocks

    KVCacheManager.allocate_slots = allocate_slots
    try:
        yield calls
    finally:
        KVCacheManager.allocate_slots = original


def hooks_alone(model: Path, options: Options) -> list[Result]:
    """What a call of get_new_blocks takes longer, hooked and with a closure that only passes on."""
    schedulers = [lockstep.build(model, LOAD, side) for side in (BARE, BARE, RECORDED)]
    bare, passing, hooked = (known.kv_cache_manager.block_pool for known in schedulers)
    original = passing.get_new_blocks

    def get_new_blocks(num_blocks: int) -> Any:
        return original(num_blocks)

    passing.get_new_blocks = get_new_blocks

    def taking(pool: Any, blocks: int) -> int:
        began = time.thread_time_ns()
        taken = [pool.get_new_blocks(blocks) for _ in range(CALLS[blocks])]
        ended = time.thread_time_ns()
        for each in taken:
            pool.free_blocks(each)
        return ended - began

    one, many = (
        _repeated(
            [partial(taking, pool, blocks) for pool in (bare, passing, hooked)], size, options
        )
        for blocks, size in CALLS.items()
    )
    floor, recorded = zip(*one, strict=True)
    more_blocks = max(CALLS) - min(CALLS)
    further = [
        1e3 * (of_many.added - of_one.added) / more_blocks
        for (_, of_many), (_, of_one) in zip(many, one, strict=True)
    ]
    return [
        _added("a closure that only passes on", floor, "get_new_blocks", "µs"),
        _added("a recorded get_new_blocks", recorded, "get_new_blocks", "µs"),
        middle("each further block of it", further, "ns", None, ""),
    ]


def packing(model: Path, options: Options) -> list[Result]:
    """What the thread that writes takes to lay out and pack a frame of one kind."""
    pool = lockstep.build(model, LOAD, BARE).kv_cache_manager.block_pool
    now = time.monotonic_ns()
    hashes = [os.urandom(32) for _ in range(PACKED)]
    frames: dict[str, list[Event]] = {
        "": [],
        "packing an event": [(encode.once, Op.LOOKUP, now, (1, 500, 480, 0))] * PACKED,
        "packing a block id": [(encode.blocks, Op.ALLOCATE, now, *pool.blocks[:PACKED])],
        "packing a block hash": [(encode.cached, Op.CACHE, now, 1, hashes, 0, PACKED)],
    }
    found = _repeated([partial(_pack, events, now) for events in frames.values()], PACKED, options)
    return [
        _added(name, of_one, "an empty frame's part", "ns")
        for name, of_one in zip(list(frames)[1:], zip(*found, strict=True), strict=True)
    ]


def _pack(events: list[Event], since: int) -> int:
    began = time.thread_time_ns()
    columns = Columns()
    for kept in events:
        kept[0](columns, kept)
    columns.pack(since)
    return time.thread_time_ns() - began


def writing(path: Path, options: Options) -> list[Result]:
    """What a step takes to be written, and as many bytes by themselves."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # Without a thread, a step is written as it ends.
    recording._writer = NoThread()
    recorder = Recorder(os.open(path, flags), {"producer": "engine", "rank": 0}, "engine 0")
    bare = os.open(path.with_suffix(".bare"), flags)

    def flushed() -> int:
        now = time.monotonic_ns()
        for _ in range(STEP_EVENTS):
            recorder.keep((encode.once, Op.LOOKUP, now, (1, 500, 480, 0)))
        began = time.thread_time_ns()
        recorder.step_ended()
        return time.thread_time_ns() - began

    size = path.stat().st_size
    flushed()
    data = bytes(path.stat().st_size - size)

    def written() -> int:
        began = time.thread_time_ns()
        os.write(bare, data)
        return time.thread_time_ns() - began

    found = _repeated([lambda: 0, written, flushed], 1, options)
    recorder.close()
    os.close(bare)
    names = f"os.write of {len(data)} bytes", f"writing a step of {STEP_EVENTS} events"
    return [
        _added(name, each, "nothing", "µs")
        for name, each in zip(names, zip(*found, strict=True), strict=True)
    ]


def _repeated(sides: Sequence[Callable[[], int]], size: int, options: Options) -> list[list[Times]]:
    return [compare(sides, options.pairs, size, seed) for seed in range(options.repeats)]


def _added(name: str, found: Sequence[Times], what: str, unit: str) -> Result:
    scale = 1e3 if unit == "ns" else 1
    return middle(name, [scale * each.added for each in found], unit, None, note(found, what))


if __name__ == "__main__":
    run(__doc__, add_options, measure)
