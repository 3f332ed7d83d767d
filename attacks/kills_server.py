# SPDX-License-Identifier: Apache-2.0
"""Signals at random moments, to the processes of a real ``vllm serve`` under load.

The engine's scheduler notes each step that ended in a file of its own. Two servers run at a time.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.figure import Figure
from tests.kv.test_killed import QUICK_LOSS_SEC
from tests.support import engine
from tests.support.engine import Answer, Lab
from tests.support.scheduler import tokens

TARGETS = ("API server", "engine core", "collector", "process group")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
"""SIGSTOP is followed by SIGCONT."""
STOPPED_SEC = 2.0
CLIENTS = 4
LOAD_SEC = 6.0
"""Signals come in the first so many seconds of load."""
LEAVE_SEC = 30
"""A server that was asked to end, or that lost a process, has so long to end by itself."""
TABLE_FILES = {
    *("kv_cache_usage.csv", "kv_cache_allocations.csv", "kv_cache_evictions.csv"),
    *("prefix_cache_lookups.csv", "scheduler_steps.csv", "requests.jsonl"),
    *("kv_cache_summary.txt", "metadata.json"),
}


@dataclass(frozen=True)
class Attempt:
    """What came of one server."""

    about: str
    lost_steps: int
    lost_sec: float
    lost_tokens: int
    is_sound: bool
    finalized: bool
    left_files: tuple[str, ...]
    left_processes: tuple[str, ...]
    zombies: int
    survived: bool | None
    """Whether the server went on answering, where it should; else None."""
    collector_sec: float


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    lab = Lab(folder)
    chance = random.Random(seed)
    plans = [
        (TARGETS[number % 4], SIGNALS[number // 4 % 4], chance.uniform(0.1, LOAD_SEC))
        for number in range(count)
    ]
    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(lambda at: attempt(lab, *at), enumerate(plans)))
    for one in seen:
        if not one.is_sound or one.left_files or one.left_processes or one.survived is False:
            print(f"  {one}")
    return [
        Figure("servers", len(seen)),
        Figure("steps lost, at most in a session", max(one.lost_steps for one in seen)),
        Figure(
            "from the first lost step to the last",
            max(one.lost_sec for one in seen),
            "s",
            QUICK_LOSS_SEC,
        ),
        Figure("tokens that clients got and tables lack", sum(one.lost_tokens for one in seen)),
        Figure("sessions not sound", sum(not one.is_sound for one in seen), most=0),
        Figure("servers that a signal to others ended", count_of(seen, survived), most=0),
        Figure("files left besides the tables", sum(len(one.left_files) for one in seen), most=0),
        Figure("processes left", sum(len(one.left_processes) for one in seen), most=0),
        Figure("zombies", sum(one.zombies for one in seen), most=0),
        Figure(
            "until the collector had ended, at most",
            max(one.collector_sec for one in seen),
            "s",
            engine.SETTLED_SECONDS,
        ),
        Figure("completed afterwards by finalize", sum(one.finalized for one in seen)),
    ]


def count_of(seen: list[Attempt], is_one: Callable[[Attempt], bool]) -> int:
    return sum(map(is_one, seen))


def survived(one: Attempt) -> bool:
    """Whether the server should have gone on, and did not."""
    return one.survived is False


def attempt(lab: Any, number: int, plan: tuple[str, signal.Signals, float]) -> Attempt:
    target, sent, moment = plan
    name = f"server-{number}"
    steps = lab.folder / f"{name}.steps"
    options = ("--scheduler-cls=attacks.apps.counted.CountedScheduler", "--no-async-scheduling")
    # What should not be touched by the signal goes on.
    goes_on = target == "collector" or sent == signal.SIGSTOP
    went_on = None
    with lab.server(name, *options, ATTACK_STEPS_FILE=str(steps)) as server:
        server.wait_until_ready(engine.START_SECONDS)
        session = engine.session_of(server, lab.sessions(name))
        engine.wait_for_engines(session, 1)
        received = Load(server.port)
        time.sleep(moment)
        pids = targets_of(target, server, session)
        zombies = zombies_below(server.process.pid)
        strike(pids, sent)
        if goes_on:
            went_on = len(engine.answer(server.port, tokens(99, 50), 5).tokens) == 5
            server.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(LEAVE_SEC)
    # The block has killed whatever was left of the server.
    ended = time.monotonic()
    while left := engine.processes_about(lab.sessions(name)):
        if time.monotonic() > ended + engine.SETTLED_SECONDS:
            break
        time.sleep(0.05)
    collector_sec = time.monotonic() - ended
    finalized = (session / "journal").exists()
    if finalized:
        command = [sys.executable, "-m", "profilemate", "finalize", str(session)]
        subprocess.run(command, cwd=engine.ROOT, check=False, stdout=subprocess.DEVNULL)
    known = engine.metadata(session)
    recorded = engine.rows(session, "scheduler_steps")
    noted = times(steps)
    lost = noted[sum(int(row["repeats"]) for row in recorded) :]
    decoded = engine.total(recorded, "decode_tokens")
    one = Attempt(
        about=f"{number}: {sent.name} to {target} after {moment:.2f} s",
        lost_steps=len(lost),
        lost_sec=noted[-1] - lost[0] if lost else 0.0,
        lost_tokens=max(0, received.decoded() - decoded),
        is_sound=known["complete"] and not any(one["mismatches"] for one in known["processes"]),
        finalized=finalized,
        left_files=tuple(sorted({path.name for path in session.iterdir()} - TABLE_FILES)),
        left_processes=tuple(left.values()),
        zombies=zombies,
        survived=went_on,
        collector_sec=collector_sec,
    )
    print(f"  {one.about}: {one.lost_steps} of {len(noted)} steps lost", flush=True)
    return one


class Load:
    """Clients that ask for long answers, until the server is gone."""

    def __init__(self, port: int) -> None:
        self._answers: list[Any] = []
        for number in range(CLIENTS):
            threading.Thread(target=self._ask, args=(port, number), daemon=True).start()

    def _ask(self, port: int, number: int) -> None:
        # A server that ends may send an error in the place of tokens.
        with suppress(OSError, AssertionError, KeyError):
            for turn in range(1000):
                answer = Answer(port, tokens(100 * number + turn, 150), 200)
                self._answers.append(answer)
                answer.read()

    def decoded(self) -> int:
        """Tokens that clients got, but for the first of each, which its prompt's step makes."""
        return sum(max(0, len(answer.tokens) - 1) for answer in self._answers)


def targets_of(target: str, server: Any, session: Path) -> list[int]:
    """The processes that get the signal. A server's collector is in no group of the server's."""
    if target == "API server":
        return [server.process.pid]
    if target == "engine core":
        return list(engine.engine_pids(session).values())
    if target == "collector":
        return [engine.collector_pid(session)]
    return [-server.process.pid]


def strike(pids: list[int], sent: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, sent)
    if sent == signal.SIGSTOP:
        time.sleep(STOPPED_SEC)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def times(path: Path) -> list[float]:
    """When each step ended; a step that was cut short is left out."""
    content = path.read_bytes()
    count = len(content) // 8
    return list(struct.unpack(f"{count}d", content[: 8 * count]))


def zombies_below(pid: int) -> int:
    """Processes that ended, whose parent is the server or one of its children, and still runs."""
    parents = {pid, *engine.children(pid)}
    found = 0
    for parent in parents:
        for child in engine.children(parent):
            with suppress(OSError):
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                found += state == "Z" and child not in parents
    return found
