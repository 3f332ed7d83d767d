# SPDX-License-Identifier: Apache-2.0
"""A day of a production trace, bounded: python -m benchmarks.day TRACE

vLLM's real scheduler gets the trace's requests in their own lengths and at their own times, over
and over with other contents, for a day of the trace's time. That passes as fast as steps can be
taken; --minutes ends it early, and the result says how many hours it was. All is recorded, with
VLLM_PROFILING_KEEP. Meanwhile the session's size on disk is looked at 20 times a second, and the
memory of both processes twice a second. At the end the figures of totals.json are compared with
counts taken inside the block pool, beneath the hooks.

TRACE is a file of JSON lines as Mooncake's FAST25 traces, which are not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment, sessions
from benchmarks.command import Options, count, progress, run
from benchmarks.processes import of_session
from benchmarks.result import BenchmarkError, Result, Target
from profilemate.collector.rotation import SEGMENT_BYTES, SEGMENTS_KEPT
from profilemate.format.keep import read_keep

LOOK_SEC = 0.05
"""How often the session's size is looked at."""
PROCESSES_SEC = 0.5
"""How often the collector is."""
MEMORY = Target(80)

COUNTED = {
    "allocated": "allocated_blocks",
    "reused": "reused_blocks",
    "cached": "cached_blocks",
    "freed": "freed_blocks",
}
"""What the driver counts inside the pool, by its name in totals.json."""


@dataclass
class Watched:
    """The most bytes that were on disk, those of the largest segment, and the collector's peaks."""

    disk_bytes: int = 0
    segment_bytes: int = 0
    collector_bytes: int = 0
    late_sec: float = 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="JSON lines")
    parser.add_argument("--hours", type=float, default=24, help="of the trace's time (24)")
    parser.add_argument("--minutes", type=count, default=1_000_000, help="that it may take")
    parser.add_argument("--keep", default="2GB", help="VLLM_PROFILING_KEEP (2GB)")
    parser.add_argument("--rate", type=count, default=1_000_000_000, help="block events a second")
    parser.add_argument("--blocks", type=count, default=60_000, help="of the pool (60,000)")


def measure(options: Options) -> list[Result]:
    """Megabytes on disk and in memory, and whether the totals are right."""
    environment.need_vllm()
    most = read_keep(options.keep)
    if most is None or most.most_bytes is None:
        raise BenchmarkError(f"--keep {options.keep} says no size")
    if not options.trace.is_file():
        raise BenchmarkError(f"{options.trace} is no file")
    with tempfile.TemporaryDirectory() as scratch:
        base, watched, done = Path(scratch, "sessions"), Watched(), threading.Event()
        watcher = threading.Thread(target=watch, args=(base, watched, done))
        watcher.start()
        began = time.monotonic()
        try:
            lines = list(driven(base, options, watched))
            took = time.monotonic() - began
            known = sessions.wait_until_complete(sessions.only(base))
        finally:
            done.set()
            watcher.join()
        session = sessions.only(base)
        totals = json.loads((session / "totals.json").read_bytes())
    last = lines[-1]
    wrong = list(differences(last, totals))
    settled = lines[len(lines) // 4 :]
    engine = [line["resident"] / 1e6 for line in settled]
    objects = [line["allocations"] for line in settled]
    note = (
        f"{last['events']:,} block events, {last['hours']:.1f} hours of the trace in "
        f"{took / 60:.1f} minutes; {known['segments']} segments, "
        f"{known['cost']['table_bytes'] / 1e9:.2f} GB of rows; the largest segment "
        f"{watched.segment_bytes / 1e6:.1f} MB"
    )
    segment = min(SEGMENT_BYTES, most.most_bytes / SEGMENTS_KEPT)
    bound = Target((most.most_bytes + segment) / 1e6, words=f"≤ {options.keep} and a segment")
    return [
        one("day: on disk at most", watched.disk_bytes / 1e6, "MB", bound, note),
        one("day: the collector's memory", watched.collector_bytes / 1e6, "MB", MEMORY, "peak"),
        Result(
            *("day: the engine's memory", engine[-1], min(engine), max(engine), "MB", None),
            f"after a quarter of the time {engine[0]:.1f}; Python's objects {objects[0]:,} then, "
            f"{objects[-1]:,} at the end",
        ),
        one("day: tables late at most", known["cost"]["collector_lag_sec"], "s", None, ""),
        one("day: wrong totals", len(wrong), "", Target(0), "; ".join(wrong)),
    ]


def one(name: str, figure: float, unit: str, target: Target | None, note: str) -> Result:
    return Result(name, figure, figure, figure, unit, target, note)


def driven(base: Path, options: Options, watched: Watched) -> Iterator[dict[str, Any]]:
    """Run the driver; yields its lines as they come."""
    wanted = ("hours", "minutes", "rate", "blocks")
    amount = [f"--{name}={getattr(options, name)}" for name in wanted]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.driver", "replay", str(options.trace), *amount],
        cwd=environment.ROOT,
        env={**environment.variables(base), "VLLM_PROFILING_KEEP": options.keep},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        for text in driver.stdout:
            line = json.loads(text)
            progress(
                f"{line['hours']:.1f} h, {line['events'] / 1e6:.1f} million block events, engine "
                f"{line['resident'] / 1e6:.1f} MB, {line['allocations']:,} objects, collector "
                f"{watched.collector_bytes / 1e6:.1f} MB at most, disk "
                f"{watched.disk_bytes / 1e6:.0f} MB at most, {watched.late_sec:.2f} s late"
            )
            yield line
    if driver.returncode != 0:
        raise BenchmarkError(f"the driver ended with status {driver.returncode}")


def watch(base: Path, watched: Watched, done: threading.Event) -> None:
    """Look at the session's size and at the collector until it is ``done``."""
    next_processes = 0.0
    while not done.wait(LOOK_SEC):
        for session in base.glob("session_*"):
            # What moves while it is looked at counts twice, but not at two looks in a row.
            size = min(size_of(session), size_of(session))
            watched.disk_bytes = max(watched.disk_bytes, size)
            if time.monotonic() < next_processes:
                continue
            next_processes = time.monotonic() + PROCESSES_SEC
            for segment in (session / "segments").glob("[0-9]*"):
                watched.segment_bytes = max(watched.segment_bytes, size_of(segment))
            for process in of_session(session):
                watched.collector_bytes = max(watched.collector_bytes, peak_of(process))
            with suppress(OSError, ValueError):
                found = json.loads((session / "totals.json").read_bytes())
                watched.late_sec = found["collector"]["longest_lag_ns"] / 1e9


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder, however deep: each file's length, or the room that it has on
    the disk, where that is more."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        # What goes this very moment does not count.
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        info = entry.stat(follow_symlinks=False)
                        total += max(info.st_size, 512 * info.st_blocks)
    return total


def peak_of(process: int) -> int:
    """The most bytes of memory (resident) that a process has had."""
    with suppress(OSError, ValueError):
        for line in Path("/proc", str(process), "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def differences(counted: dict[str, Any], totals: dict[str, Any]) -> Iterable[str]:
    """Where the totals are not what was counted inside the pool."""
    pools = [pool for engine in totals["engines"] for pool in engine["pools"]]
    found = {
        name: sum(group[key] for pool in pools for group in pool["groups"])
        for name, key in COUNTED.items()
    }
    found["evicted"] = sum(row["blocks"] for pool in pools for row in pool["evictions"])
    for name, number in found.items():
        if number != counted[name]:
            yield f"{name} {number:,}, and {counted[name]:,} inside the pool"


if __name__ == "__main__":
    run(__doc__, add_options, measure)
