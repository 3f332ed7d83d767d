# SPDX-License-Identifier: Apache-2.0
"""Signals at random moments, to an engine, to its collector or to both.

An engine is a fork that drives vLLM's own scheduler, always through the same steps. It counts its
steps in memory that it shares with the attack. What it leaves is compared with what it leaves
undisturbed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from attacks.figure import Figure
from attacks.watching import watch_schedulers
from profilemate import collector
from tests.kv.children import Child, Say, processes_with
from tests.kv.recording import TABLES, Clock, Tables, found, hooks_only, make_tables, only_session
from tests.kv.test_killed import QUICK_LOSS_SEC, settled
from tests.kv.test_killed import run as drive
from tests.support.scheduler import write_model

TARGETS = ("engine", "collector", "both")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
"""SIGSTOP is followed by SIGCONT."""
STOPPED_SEC = (0.05, 1.5)
PATIENCE_SEC = 120
TABLE_FILES = {*TABLES, "kv_cache_summary.txt", "metadata.json"}
MOST_STEPS = 5_000
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Steps:
    """When each step ended, in memory that outlives the process which counts."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8 * (MOST_STEPS + 1))

    def add(self) -> None:
        """A step has ended."""
        count = len(self.ended())
        struct.pack_into("d", self._shared, 8 * (count + 1), time.monotonic())
        struct.pack_into("q", self._shared, 0, count + 1)

    def ended(self) -> list[float]:
        (count,) = struct.unpack_from("q", self._shared)
        return list(struct.unpack_from(f"{count}d", self._shared, 8))


@dataclass
class Seen:
    """What all attempts came to."""

    counts: Counter[str] = field(default_factory=Counter)
    lost_sec: float = 0.0
    lost_steps: int = 0
    collector_sec: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def broke(self, promise: str, about: str) -> None:
        self.counts[promise] += 1
        self.complaints.append(f"{promise}: {about}")


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    chance = random.Random(seed)
    model = write_model(folder / "model")
    watch_schedulers()
    adopt_orphans()
    whole = tables_of_an_undisturbed_run(model, folder / "whole")
    seen = Seen()
    began = time.monotonic()
    _attempt(model, folder / "undisturbed", whole, chance, seen, None, signal.SIGCONT, 1e9)
    length = time.monotonic() - began
    for number in range(count):
        target, sent = chance.choice(TARGETS), chance.choice(SIGNALS)
        moment = chance.uniform(0, length)
        _attempt(model, folder / str(number), whole, chance, seen, target, sent, moment)
        if sys.stdout.isatty() or number % 20 == 19:
            print(f"  {number + 1} of {count}, {len(seen.complaints)} complaints", flush=True)
    for complaint in seen.complaints:
        print(f"  {complaint}")
    counts = seen.counts
    return [
        Figure("attempts", count),
        *(Figure(f"signals to {name}", counts[name]) for name in TARGETS),
        Figure("runs killed before their first step", counts["nothing"]),
        Figure("runs cut short", counts["cut"]),
        Figure("steps lost, at most in a run", seen.lost_steps),
        Figure("from the first lost step to the last", seen.lost_sec, "s", QUICK_LOSS_SEC),
        Figure("tables that do not begin as undisturbed", counts["table"], most=0),
        Figure("sessions not complete, or with mismatches", counts["metadata"], most=0),
        Figure("files left besides the tables", counts["files"], most=0),
        Figure("processes left", counts["orphan"], most=0),
        Figure("zombies of the engine", counts["zombie"], most=0),
        Figure("until the collector had ended, at most", seen.collector_sec, "s", PATIENCE_SEC),
        Figure("completed afterwards, as the collector was killed", counts["finalized"]),
    ]


def adopt_orphans() -> None:
    """Whatever loses its parent becomes a child of this process, so that none is overlooked."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def tables_of_an_undisturbed_run(model: Path, folder: Path) -> dict[str, bytes]:
    folder.mkdir()

    def engine(say: Say) -> None:
        clock = Clock()
        with hooks_only(folder, clock, name=found(folder, clock)):
            drive(model, clock)

    assert Child(engine).end() == 0
    whole: dict[str, bytes] = make_tables(only_session(folder), folder / "tables").bytes_of()
    return whole


def _attempt(
    model: Path,
    folder: Path,
    whole: dict[str, bytes],
    chance: random.Random,
    seen: Seen,
    target: str | None,
    sent: signal.Signals,
    moment: float,
) -> None:
    folder.mkdir()
    scratch = folder / "tmp"
    scratch.mkdir()
    steps, waits = Steps(), chance.random() < 0.5
    about = f"{folder.name}: {sent.name} to {target} after {moment:.3f} s"
    child = Child(_engine(model, folder, scratch, steps, waits))
    session = folder / "session_20260101_000000_founded"
    child.next()
    deadline = time.monotonic() + moment
    while time.monotonic() < deadline and not _has_ended(child.pid):
        time.sleep(0.002)
    if _zombies_of(child.pid):
        seen.broke("zombie", about)
    if target is not None:
        seen.counts[target] += 1
        _send(sent, target, child.pid, session, chance)
    code = child.end()
    ended_at = time.monotonic()
    if not _have_all_ended(ended_at + PATIENCE_SEC):
        seen.broke("orphan", about)
    seen.collector_sec = max(seen.collector_sec, time.monotonic() - ended_at)
    if code not in (0, -signal.SIGKILL, -signal.SIGTERM, 1):
        seen.broke("exit", f"{about}: {code}")
    _check(session, scratch, whole, steps, seen, about, code)


def _engine(
    model: Path, folder: Path, scratch: Path, steps: Steps, waits: bool
) -> Callable[[Say], None]:
    def engine(say: Say) -> None:
        def count(words: list[object]) -> None:
            if words[0] == "updated":
                steps.add()

        os.setpgid(0, 0)
        os.environ["TMPDIR"] = str(scratch)
        # As vLLM's engines: asked to end, they unwind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        clock = Clock()
        name = found(folder, clock)
        say("ready")
        pause = (lambda: time.sleep(0.001)) if waits else (lambda: None)
        with hooks_only(folder, clock, name=name, collector=True):
            drive(model, clock, count, pause)

    return engine


def _send(
    sent: signal.Signals, target: str, pid: int, session: Path, chance: random.Random
) -> None:
    pids = [] if target == "collector" else [pid]
    if target != "engine":
        pids += processes_with(session)
    for one in pids:
        with suppress(ProcessLookupError):
            os.kill(one, sent)
    if sent == signal.SIGSTOP:
        time.sleep(chance.uniform(*STOPPED_SEC))
        for one in pids:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)


def _check(
    session: Path,
    scratch: Path,
    whole: dict[str, bytes],
    steps: Steps,
    seen: Seen,
    about: str,
    code: int,
) -> None:
    all_steps = code == 0
    ended = steps.ended()
    if not ended and not list(session.glob("journal/*.journal")):
        seen.counts["nothing"] += 1
        return
    if (session / "journal").exists():
        seen.counts["finalized"] += 1
        collector.finalize(session)
    tables = Tables(session)
    contents = tables.bytes_of()
    for table, content in contents.items():
        if all_steps:
            is_right = content == whole[table]
        else:
            is_right = whole[table].startswith(settled(table, contents, unwound=code == 1))
        if not is_right:
            seen.broke("table", f"{about}: {table}")
    recorded = sum(row["repeats"] for row in tables.rows("scheduler_steps.csv"))
    lost = ended[recorded:]
    if lost:
        seen.counts["cut"] += 1
        seen.lost_steps = max(seen.lost_steps, len(lost))
        seen.lost_sec = max(seen.lost_sec, ended[-1] - lost[0])
    metadata = tables.metadata
    mismatches = sum(process["mismatches"] for process in metadata["processes"])
    if not metadata["complete"] or mismatches:
        seen.broke("metadata", about)
    left = {path.name for path in session.iterdir()} - TABLE_FILES
    if left or list(scratch.iterdir()):
        seen.broke("files", f"{about}: {sorted(left)} {sorted(scratch.iterdir())}")


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _zombies_of(pid: int) -> list[int]:
    """Children of this process that have ended and that nobody waited for.

    Python looks every 50 ms whether a process that it waits for has ended.
    """
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    ended = [child for child in map(int, children) if _has_no_command(child)]
    if ended:
        time.sleep(0.5)
    return [child for child in ended if _has_no_command(child)]


def _has_no_command(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def _have_all_ended(deadline: float) -> bool:
    """Wait for whatever the engine started, which is a child of this process by now."""
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if not pid:
            time.sleep(0.01)
    return False
