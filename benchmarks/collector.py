# SPDX-License-Identifier: Apache-2.0
"""How fast the collector makes tables, and in how much memory: python -m benchmarks.collector

Records vLLM's real scheduler under the trace in tests/data, over and over with new contents, and
times the collector's whole process on 1, 4 and 10 times the trace: block events (blocks allocated,
reused, freed or cached) a second of processor time, the peak of its memory, and by how much that
peak grows from the shortest to the longest.

  python -m benchmarks.collector --finalize       `profilemate finalize`, the command, instead
  python -m benchmarks.collector --events 50e6    so many events in the longest recording, which
                                                  takes the better part of an hour to make, once
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import recordings
from benchmarks.command import Options, count, progress, run
from benchmarks.result import Result, Target, middle

SPEED = Target(500_000, "higher")
MEMORY = Target(80)
FLAT = Target(5, words="≤ 5 MB, with 50 million events, too")

EVENTS_A_PASS = 233_000
"""About so many are in the trace with this pool."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=count, help="block events of the longest recording")
    parser.add_argument("--finalize", action="store_true", help="time `profilemate finalize`")
    parser.add_argument("--repeats", type=count, default=3, help="of the longest recording (3)")


def measure(options: Options) -> list[Result]:
    """Speed, memory, and the growth of memory."""
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
    return [
        middle(f"{name}: speed", speeds, "block events/CPU s", SPEED, size),
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


if __name__ == "__main__":
    run(__doc__, add_options, measure)
