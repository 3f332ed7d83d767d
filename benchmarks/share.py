# SPDX-License-Identifier: Apache-2.0
"""How much of a processor recording needs: python -m benchmarks.share

vLLM's real scheduler hands out, caches and frees blocks at several steady rates, one after the
other, recorded, with the collector beside it. Each time counts the processor time of the collector
and of the thread that writes, as a share of one core. With --trace FILE it replays a trace, as
`python -m benchmarks.day` does, else prompts of 2,000 tokens of which none is like another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import environment, sessions
from benchmarks.command import Options, count, progress, run
from benchmarks.processes import of_session
from benchmarks.result import BenchmarkError, Result, middle

TICKS = os.sysconf("SC_CLK_TCK")
SETTLE_SEC = 10.0
PATIENCE_SEC = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates", type=count, nargs="+", default=[10_000, 30_000, 100_000, 200_000]
    )
    parser.add_argument("--seconds", type=count, default=20, help="of each rate (20)")
    parser.add_argument("--trace", type=Path, help="JSON lines")


def measure(options: Options) -> list[Result]:
    """Shares of a core, in percent."""
    environment.need_vllm()
    return [result for rate in options.rates for result in at_rate(rate, options)]


def at_rate(rate: int, options: Options) -> Iterator[Result]:
    """The collector's share and the thread's at this rate of block events."""
    load = ["replay", str(options.trace), "--hours=1e6"] if options.trace else ["long"]
    amount = [] if options.trace else ["--events=1e12"]
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "sessions")
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.driver", *load, *amount, f"--rate={rate}"],
            cwd=environment.ROOT,
            env=environment.variables(base),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as driver:
            try:
                wait_for(base, driver)
                time.sleep(SETTLE_SEC)
                session = sessions.only(base)
                began, first, before = time.monotonic(), read(session), used_sec(session)
                time.sleep(options.seconds)
                took, last, after = time.monotonic() - began, read(session), used_sec(session)
            finally:
                driver.terminate()
    # The totals are written once a second, so their own clock counts.
    passed = (last["until_ns"] - first["until_ns"]) / 1e9
    events = (moved(last) - moved(first)) / passed
    writing = sum(
        new["writing_ns"] - old["writing_ns"]
        for old, new in zip(first["processes"], last["processes"], strict=True)
    )
    shares = [100 * (after - before) / took, writing / passed / 1e7]
    progress(f"{events:,.0f} block events/s: {shares[0]:.1f} %, {shares[1]:.1f} %")
    note = f"{events:,.0f} block events/s were made"
    for name, share in zip(("collector", "writing thread"), shares, strict=True):
        yield middle(f"share of a core at {rate:,}/s: {name}", [share], "%", None, note)


def wait_for(base: Path, driver: subprocess.Popen[bytes]) -> None:
    """Wait for the session's first totals.

    Raises:
        BenchmarkError: none come.

    """
    deadline = time.monotonic() + PATIENCE_SEC
    while not list(base.glob("session_*/totals.json")):
        if driver.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError("no session appeared: was anything recorded?")
        time.sleep(0.1)


def read(session: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((session / "totals.json").read_bytes())
    return found


def moved(totals: dict[str, Any]) -> int:
    """Blocks that were allocated, reused, cached or freed."""
    return sum(
        number
        for engine in totals["engines"]
        for pool in engine["pools"]
        for group in pool["groups"]
        for key, number in group.items()
        if key != "group"
    )


def used_sec(session: Path) -> float:
    """Processor time of the session's collector."""
    ticks = 0
    for process in of_session(session):
        with suppress(OSError):
            stat = Path("/proc", str(process), "stat").read_text()
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / TICKS


if __name__ == "__main__":
    run(__doc__, add_options, measure)
