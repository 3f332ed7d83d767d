# SPDX-License-Identifier: Apache-2.0
"""How long from an event to its row in the CSV: python -m benchmarks.row_delay

vLLM's real scheduler takes 5,000 steps a second with one request running, recorded, and the
collector follows as it does beside any engine. This process watches kv_cache_usage.csv and
scheduler_steps.csv grow: a row's delay is the moment it was seen in the file less the time in
the row. The longest of all rows counts, if this machine can take steps at that rate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from benchmarks import environment, sessions
from benchmarks.command import Options, count, progress, run
from benchmarks.result import BenchmarkError, Result, Target, middle, unmeasured

TARGET = Target(1.0)
TABLES = ("scheduler_steps.csv", "kv_cache_usage.csv")
LOOK_SEC = 0.01
REACHED = 0.95
"""Less of the rate than this would say nothing of the target."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=count, default=5_000, help="steps a second (5,000)")
    parser.add_argument("--seconds", type=float, default=20, help="of stepping (20)")
    parser.add_argument("--repeats", type=count, default=3, help="of the whole (3)")


def measure(options: Options) -> list[Result]:
    """The longest delay of a row in seconds."""
    environment.need_vllm()
    name = f"event to CSV row at {options.rate:,} steps/s"
    longest, notes = [], []
    for number in range(options.repeats):
        delays, rate = watch(options.rate, options.seconds)
        delays.sort()
        percentile = delays[int(0.99 * len(delays))]
        note = f"99 % within {percentile:.2f} s, {len(delays):,} rows at {rate:,.0f} steps/s"
        progress(f"{number + 1} of {options.repeats}: {delays[-1]:.2f} s at most, {note}")
        if rate < REACHED * options.rate:
            why = f"only {rate:,.0f} steps/s were reached here: {delays[-1]:.2f} s at most, {note}"
            return [unmeasured(name, why, TARGET, "s")]
        longest.append(delays[-1])
        notes.append(note)
    return [middle(name, longest, "s", TARGET, notes[-1])]


def watch(rate: int, seconds: float) -> tuple[list[float], float]:
    """The delay of each row, and the steps a second that were reached."""
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "sessions")
        options = [f"--rate={rate}", f"--seconds={seconds}"]
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.driver", "paced", *options],
            cwd=environment.ROOT,
            env=environment.variables(base),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as driver:
            seen = list(rows(base, driver))
            said = driver.stdout.read() if driver.stdout else ""
        if driver.returncode != 0 or not seen:
            raise BenchmarkError(f"no rows (the driver ended with status {driver.returncode})")
        known = sessions.wait_until_complete(sessions.only(base))
        done = json.loads(said)
    origin = datetime.fromisoformat(known["started_at"].replace("Z", "+00:00")).timestamp()
    return [when - origin - stamp for when, stamp in seen], done["steps"] / done["seconds"]


def rows(base: Path, driver: subprocess.Popen[str]) -> Iterator[tuple[float, float]]:
    """When each new row was seen (seconds since 1970), and the time in it.

    Looks until the driver has ended and nothing new has come for a while.
    """
    # One clock that does not jump, read as time since 1970 as metadata.json has it.
    epoch = time.time() - time.monotonic()
    positions = dict.fromkeys(TABLES, 0)
    quiet_since = time.monotonic()
    while driver.poll() is None or time.monotonic() < quiet_since + 2:
        time.sleep(LOOK_SEC)
        for table in TABLES:
            for path in base.glob(f"session_*/{table}"):
                with open(path, "rb") as file:
                    file.seek(positions[table])
                    new = file.read()
                now = epoch + time.monotonic()
                whole = new[: new.rfind(b"\n") + 1]
                if whole:
                    positions[table] += len(whole)
                    quiet_since = time.monotonic()
                for row in whole.splitlines():
                    if not row.startswith(b"timestamp_sec"):
                        yield now, float(row.partition(b",")[0])


if __name__ == "__main__":
    run(__doc__, add_options, measure)
