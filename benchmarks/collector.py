# SPDX-License-Identifier: Apache-2.0
"""How fast the collector makes tables, and in how much memory: python -m benchmarks.collector

Records vLLM's real scheduler under the trace in tests/data, over and over with new contents, and
times the collector's whole process, pinned to one core, on 1, 4 and 10 times the trace: block
events (blocks allocated, reused, freed or cached) a second of processor time, the peak of its
memory, and by how much that peak grows from the shortest to the longest.

  python -m benchmarks.collector --finalize       `profilemate finalize`, the command, instead
  python -m benchmarks.collector --events 50e6    so many events in the longest recording, which
                                                  takes the better part of an hour to make, once
  python -m benchmarks.collector --conditions     what the conditions of a snapshot take, instead:
                                                  pairs with and without, and one look at an engine
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import recordings
from benchmarks.command import Options, count, progress, run
from benchmarks.result import Result, Target, middle
from profilemate import config
from profilemate.collector.engine import Engine
from profilemate.collector.follower import Follower
from profilemate.collector.requests import Request
from profilemate.collector.triggers import Triggers
from profilemate.format.when import read_when

SPEED = Target(1_000_000, "higher")
MEMORY = Target(80)
FLAT = Target(5, words="≤ 5 MB, with 50 million events, too")

CONDITIONS = (
    "preemptions>1000000/1m or usage>100%/1h or hit_rate<0%/5m or queue_p95>60m/1m"
    " or reset or crash"
)
"""None of which is ever met."""

EVENTS_A_PASS = 233_000
"""About so many are in the trace with this pool."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=count, help="block events of the longest recording")
    parser.add_argument("--finalize", action="store_true", help="time `profilemate finalize`")
    parser.add_argument("--conditions", action="store_true", help="in pairs, with and without")
    parser.add_argument("--repeats", type=count, default=3, help="of the longest recording (3)")


def measure(options: Options) -> list[Result]:
    """Speed, memory, and the growth of memory."""
    if options.conditions:
        return [added_by_conditions(options.repeats), a_reading()]
    longest = max(10, round((options.events or 0) / EVENTS_A_PASS))
    passes = sorted({1, 4, longest})
    *shorter, last = recordings.recorded(passes)
    program = recordings.FINALIZE if options.finalize else recordings.COLLECTOR
    name = "profilemate finalize" if options.finalize else "collector"
    speeds, peaks, growths = [], [], []
    small = {recording: complete(recording, program) for recording in shorter}
    _, least, _ = small[shorter[0]]
    for _ in range(options.repeats):
        speed, peak, events = complete(last, program)
        speeds.append(speed)
        peaks.append(peak)
        growths.append(peak - least)
    sizes = [*small.values(), (speeds[-1], peaks[-1], events)]
    note = ", ".join(f"{peak:.0f} MB at {events / 1e6:.1f} million" for _, peak, events in sizes)
    size = f"{events / 1e6:.1f} million block events"
    where = f"{size}, pinned to core {recordings.core()}"
    return [
        middle(f"{name}: speed", speeds, "block events/CPU s", SPEED, where),
        middle(f"{name}: memory", peaks, "MB", MEMORY, f"peak over {size}"),
        middle(f"{name}: growth", growths, "MB", FLAT, note),
    ]


def complete(recording: Path, program: Sequence[str]) -> tuple[float, float, int]:
    """Block events a second of processor time, peak of memory (MB), and block events."""
    with tempfile.TemporaryDirectory() as scratch:
        session = Path(scratch, "session")
        usage = recordings.complete(recording, session, program)
        events = recordings.block_events(session)
    speed, peak = events / usage.cpu_sec, usage.peak_bytes / 1e6
    progress(
        f"{events:,} block events in {usage.cpu_sec:.1f} s of processor time "
        f"({usage.wall_sec:.1f} s): {speed:,.0f}/s, {peak:.0f} MB"
    )
    return speed, peak, events


def added_by_conditions(pairs: int) -> Result:
    """Processor time that the collector takes longer where it looks for conditions, in percent."""
    (recording,) = recordings.recorded([4])
    draw = random.Random(0)
    sides: list[dict[str, str]] = [{}, {config.SNAPSHOT_WHEN: CONDITIONS}]
    added = []
    for _ in range(pairs):
        took = [0.0, 0.0]
        for side in draw.sample((0, 1), 2):
            with tempfile.TemporaryDirectory() as scratch:
                usage = recordings.complete(recording, Path(scratch, "session"), **sides[side])
            took[side] = usage.cpu_sec
        added.append(100 * (took[1] / took[0] - 1))
        progress(f"{took[0]:.2f} s without, {took[1]:.2f} with: {added[-1]:+.1f} %")
    return middle("collector: conditions", added, "% of its time", None, f"{pairs} pairs")


def a_reading() -> Result:
    """What one look at an engine takes, where 128 requests run and a thousand wait."""
    (recording,) = recordings.recorded([4])
    with tempfile.TemporaryDirectory() as scratch:
        session = Path(shutil.copytree(recording, Path(scratch, "session")))
        follower = Follower(session, session)
        follower.discover()
        while follower.read():
            follower.apply()
        (producer,) = follower.ordered()
        engine = producer.state
        assert isinstance(engine, Engine)
        now = engine.last_ns
        for number in range(1_128):
            engine._requests[-1 - number] = Request(
                -1 - number,
                "",
                "",
                0,
                None,
                None,
                0,
                [],
                now - number,
                admitted=1 if number < 128 else None,
            )
        triggers = Triggers(read_when(CONDITIONS))
        took = []
        for _ in range(2_000):
            began = time.perf_counter_ns()
            triggers.read(follower, now)
            took.append((time.perf_counter_ns() - began) / 1e3)
        follower.close()
    took.sort()
    note = "once a second; six conditions, 1,128 requests"
    return middle("collector: a look at an engine", took[100:-100], "µs", None, note)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
