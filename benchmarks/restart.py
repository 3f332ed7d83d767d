# SPDX-License-Identifier: Apache-2.0
"""How long a killed collector is missed: python -m benchmarks.restart

vLLM's real scheduler evicts a block for each that it hands out, at a steady rate of block events,
recorded. The collector is killed again and again, each time when it has caught up and a random
while has passed. What counts is the time from the kill until the tables are late no more: their
last step is a second old at most. Beside it stand how long it took until another collector was
there, and how many bytes of journals no closed segment had.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import environment, sessions
from benchmarks.command import Options, count, progress, run
from benchmarks.processes import of_session
from benchmarks.result import BenchmarkError, Result, Target, middle
from profilemate.format.folder import Folder
from profilemate.format.session import read_founding
from profilemate.record.backlog import RESTART_SEC

TARGET = Target(5.0)
LOOK_SEC = 0.01
LATE_SEC = 1.0
PATIENCE_SEC = 120.0


@dataclass(frozen=True)
class Kill:
    """Seconds from the kill to another collector and to tables that are late no more, and the
    bytes that the journals had when it came."""

    started_sec: float
    caught_up_sec: float
    journal_bytes: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=count, default=150_000, help="block events a second")
    parser.add_argument("--blocks", type=count, default=4_000, help="of the pool (4,000)")
    parser.add_argument("--kills", type=count, default=8, help="of the collector (8)")


def measure(options: Options) -> list[Result]:
    """Seconds from a kill to tables that are late no more, and to another collector."""
    environment.need_vllm()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "sessions")
        amount = [f"--rate={options.rate}", f"--blocks={options.blocks}", "--events=1e12"]
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.driver", "long", *amount],
            cwd=environment.ROOT,
            env=environment.variables(base),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as driver:
            try:
                found = list(kills(base, driver, options.kills))
            finally:
                driver.terminate()
        stop(sessions.only(base))
    note = f"of {options.rate:,} block events a second, {options.blocks:,} blocks"
    sizes = [each.journal_bytes / 1e6 for each in found]
    return [
        middle("restart: caught up", [kill.caught_up_sec for kill in found], "s", TARGET, note),
        middle("restart: another one", [kill.started_sec for kill in found], "s", None, ""),
        middle("restart: journals at the kill", sizes, "MB", None, ""),
    ]


def kills(base: Path, driver: subprocess.Popen[bytes], number: int) -> list[Kill]:
    """Kill the collector of the one session there so often."""
    draw = random.Random(1)
    found: list[Kill] = []
    session = appeared(base)
    origin = origin_ns(session)
    for _ in range(number):
        wait(driver, lambda: age_sec(session, origin) < LATE_SEC)
        time.sleep(RESTART_SEC + 4 * draw.random())
        wait(driver, lambda: age_sec(session, origin) < LATE_SEC)
        size = sum(path.stat().st_size for path in session.glob("journal/*.journal"))
        killed_at = time.monotonic()
        stop(session)
        wait(driver, lambda: bool(of_session(session)))
        started = time.monotonic() - killed_at

        wait_until_fresh(driver, session, origin, killed_at)
        found.append(Kill(started, time.monotonic() - killed_at, size))
        progress(
            f"another one after {started:.2f} s, caught up after {found[-1].caught_up_sec:.2f} s; "
            f"{size / 1e6:.1f} MB of journals"
        )
    return found


def wait(driver: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    """Wait for something to be there.

    Raises:
        BenchmarkError: it takes too long, or the driver has ended.

    """
    deadline = time.monotonic() + PATIENCE_SEC
    while not is_there():
        if driver.poll() is not None:
            raise BenchmarkError(f"the driver ended with status {driver.returncode}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"nothing came of it within {PATIENCE_SEC:.0f} s")
        time.sleep(LOOK_SEC)


def wait_until_fresh(
    driver: subprocess.Popen[bytes], session: Path, origin: int, killed_at: float
) -> None:
    """Wait for a last step that is not old. One from before the kill is its predecessor's."""

    def is_fresh() -> bool:
        return age_sec(session, origin) < min(LATE_SEC, time.monotonic() - killed_at)

    wait(driver, is_fresh)


def appeared(base: Path) -> Path:
    """The session, once its collector has begun."""
    deadline = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < deadline:
        for metadata in base.glob("session_*/metadata.json"):
            return metadata.parent
        time.sleep(LOOK_SEC)
    raise BenchmarkError("no session appeared: was anything recorded?")


def origin_ns(session: Path) -> int:
    """Second 0 of the session."""
    with Folder.own(session) as folder, folder.folder("journal") as journals:
        return read_founding(journals).origin_ns


def age_sec(session: Path, origin: int) -> float:
    """How old the last step in the tables is; infinite while there is none."""
    with suppress(OSError, ValueError), open(session / "scheduler_steps.csv", "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        row = file.read().splitlines()[-2]
        return (time.monotonic_ns() - origin) / 1e9 - float(row.partition(b",")[0])
    return float("inf")


def stop(session: Path) -> None:
    """Kill the session's collector."""
    for process in of_session(session):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    while of_session(session):
        time.sleep(LOOK_SEC / 10)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
