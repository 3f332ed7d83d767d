# SPDX-License-Identifier: Apache-2.0
"""SIGKILL while a session is completed: by ``finalize``, by the analyzer, or by its collector.

First before each file operation in turn, then at random moments. After each kill the session is
completed undisturbed, and has to be what it is without a kill. Then, collectors beside a scheduler
that runs are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import track

from attacks.figure import Figure
from attacks.watching import watch_schedulers
from profilemate import ROOT, collector
from profilemate.collector.__main__ import _follow
from profilemate.collector.completing import complete
from profilemate.collector.follower import Follower
from profilemate.format.errors import SessionError
from profilemate.format.journal import Kind, frame
from tests.kv.children import Child, Say, processes_with
from tests.kv.recording import Tables, hooks_only, make_tables, only_session
from tests.support.scheduler import (
    RequestMaker,
    build_scheduler,
    step,
    trace_requests,
    write_model,
)

LIVE = 20
"""Collectors that are killed beside a scheduler."""

LIVE_REQUESTS = 150
REQUESTS = 6
"""Of the session that is completed."""

COMMANDS = 20
"""Whole commands that are killed."""

DAMAGE = frame(Kind.EVENTS, b"\xff" * 50)
OPERATIONS = ("open", "os.", "shutil.")
"""Events of Python's audit that begin like this are file operations."""

Action = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A session as a kill may find it, and what comes of it undisturbed."""

    name: str
    action: Action
    session: Path
    expected: dict[str, bytes]


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    model = write_model(folder / "model")
    recorded = record(model, folder / "recorded")
    seen: Counter[str] = Counter()
    cases = make_cases(recorded, folder)
    for case in cases:
        operation = 0
        while attempt(case, folder / "attempt", seen, before=operation):
            operation += 1
        seen["kills before each file operation"] += operation
        print(f"{case.name}: killed before each of {operation} file operations")
    chance = random.Random(seed)
    left = max(0, count - seen["kills before each file operation"])
    for number in track(range(left), "at random", disable=not sys.stdout.isatty()):
        case = cases[number % len(cases)]
        attempt(case, folder / "attempt", seen, after_sec=chance.uniform(0, 0.06))
        seen["kills at random"] += 1
    for _ in range(COMMANDS):
        command(cases[0], folder / "attempt", seen, chance.uniform(0.2, 1.5))
    watch_schedulers()
    for number in range(LIVE):
        live(model, folder / f"live{number}", seen, chance)
    return [
        *(Figure(name, seen[name]) for name in sorted(seen) if name.startswith(("kills", "ended"))),
        *(Figure(name, seen[name], most=0) for name in PROMISED),
    ]


PROMISED = (
    "sessions that differ afterwards",
    "sessions called complete with less",
    "sessions that cannot be completed",
    "temporary files left",
    "processes left",
    "steps lost beside a killed collector",
)


def record(model: Path, sessions: Path) -> Path:
    """A session of a scheduler whose process was killed, and no collector."""

    def engine(say: Say) -> None:
        # Here, as forks of a process that has vLLM take long.
        watch_schedulers()
        with hooks_only(sessions):
            scheduler = build_scheduler(model, 600)
            drive(scheduler, REQUESTS)
            time.sleep(1)
            say("done")
            time.sleep(600)

    child = Child(engine)
    child.next()
    child.kill()
    child.end()
    session: Path = only_session(sessions)
    return session


def drive(scheduler: object, requests: int, pause_sec: float = 0.0) -> int:
    """Run requests of the trace to their end; returns the steps."""
    pending = [request for _, request in trace_requests(RequestMaker(), requests)][::-1]
    steps = 0
    while pending or scheduler.has_unfinished_requests():  # type: ignore[attr-defined]
        if pending:
            scheduler.add_request(pending.pop())  # type: ignore[attr-defined]
        step(scheduler)
        steps += 1
        time.sleep(pause_sec)
    return steps


def make_cases(recorded: Path, folder: Path) -> list[Case]:
    """Sessions without a collector, with one that was killed, damaged, put aside, and complete."""

    def case(name: str, action: Action, prepare: Callable[[Path], None]) -> Case:
        session = folder / "cases" / name
        shutil.copytree(recorded, session)
        prepare(session)
        undisturbed = folder / "undisturbed" / name
        shutil.copytree(session, undisturbed)
        finish(undisturbed)
        return Case(name, action, session, contents(undisturbed))

    finalize = collector.finalize
    return [
        case("nothing but journals", finalize, lambda session: None),
        case("half followed", finalize, half_follow),
        case("damaged", finalize, damage),
        case("damaged, followed", follow, damage),
        case("put aside", finalize, put_aside),
        case("complete, with its journals", finalize, complete_with_journals),
        case("opened", partial(complete, wait=False), half_follow),
        case("followed", follow, lambda session: None),
    ]


def follow(session: Path) -> None:
    """Be the session's collector, to its end."""
    _follow(session, detached=False)


def half_follow(session: Path) -> None:
    """As a collector left it that was killed halfway."""
    path = next((session / "journal").glob("*.journal"))
    journal = path.read_bytes()
    path.write_bytes(journal[: len(journal) // 2])
    follower = Follower(session, session)
    follower.discover()
    while follower.read():
        follower.apply()
    follower.write(ended=False)
    path.write_bytes(journal)


def damage(session: Path) -> None:
    """Put a frame at the end that holds no events."""
    with next((session / "journal").glob("*.journal")).open("ab") as journal:
        journal.write(DAMAGE)


def put_aside(session: Path) -> None:
    """As a release left it that could not read all of the journal; this one can."""
    journal = next((session / "journal").glob("*.journal")).read_bytes()
    damage(session)
    finish(session)
    next((session / "journal-kept").glob("*.journal")).write_bytes(journal)


def complete_with_journals(session: Path) -> None:
    """As a kill left it when only the journals were to be removed."""
    journals = session.with_name("journals")
    shutil.copytree(session / "journal", journals)
    finish(session)
    journals.rename(session / "journal")


def finish(session: Path) -> bool:
    """Complete the session undisturbed; returns whether that went well."""
    try:
        collector.finalize(session)
    except SessionError:
        return False
    return True


def contents(session: Path) -> dict[str, bytes]:
    """What there is besides the journals; of metadata.json what does not depend on the clock."""
    files = {path.name: path for path in session.iterdir() if path.is_file()}
    found = {name: path.read_bytes() for name, path in files.items()}
    if "metadata.json" in found:
        metadata = json.loads(found["metadata.json"])
        # The one that followed knows how late it was.
        for key in ("cost", "gpu_memory"):
            metadata.pop(key, None)
        found["metadata.json"] = json.dumps(metadata).encode()
    return found


def attempt(
    case: Case,
    session: Path,
    seen: Counter[str],
    *,
    before: int | None = None,
    after_sec: float = 0.0,
) -> bool:
    """Kill one that completes the session, and see what comes of it; returns whether it was killed.

    Args:
        case: the session, and how it is completed.
        session: where a copy of it goes.
        seen: what has been counted.
        before: kill before so many file operations have been made.
        after_sec: where ``before`` is not given, kill after so many seconds.

    """
    shutil.rmtree(session, ignore_errors=True)
    shutil.copytree(case.session, session)
    pid = os.fork()
    if not pid:
        be_killed(case.action, session, before)
    if before is None:
        time.sleep(after_sec)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    if before is None and not killed:
        seen["ended before they were killed"] += 1
    check(case, session, seen)
    return killed


def be_killed(action: Action, session: Path, before: int | None) -> None:
    """In a fork: complete the session, and be killed before that file operation."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    left = before

    def watch(event: str, _: tuple[object, ...]) -> None:
        nonlocal left
        if left is not None and event.startswith(OPERATIONS):
            left -= 1
            if left < 0:
                left = None
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        if before is not None:
            sys.addaudithook(watch)
        action(session)
    finally:
        os._exit(0)


def check(case: Case, session: Path, seen: Counter[str]) -> None:
    """Whether it promises nothing that it does not hold, and can be completed."""
    found = contents(session)
    expected = tables_of(case.expected)
    if json.loads(found.get("metadata.json", b"{}")).get("complete") is True:
        seen["sessions called complete with less"] += tables_of(found) != expected
    if not finish(session) and (session / "journal").is_dir():
        seen["sessions that cannot be completed"] += 1
    found = contents(session)
    left = [name for name in os.listdir(session) if name.startswith(".")]
    seen["temporary files left"] += len(left)
    seen["sessions that differ afterwards"] += found != case.expected
    if found != case.expected or left:
        names = [
            name for name in found | case.expected if found.get(name) != case.expected.get(name)
        ]
        print(f"{case.name}: {names} differ, {left} are left")
    is_kept = (session / "journal-kept").is_dir()
    seen["sessions that differ afterwards"] += is_kept != case.name.startswith("damaged")


def tables_of(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in found.items() if name != "metadata.json"}


def command(case: Case, session: Path, seen: Counter[str], after_sec: float) -> None:
    """Kill the whole ``profilemate finalize``."""
    shutil.rmtree(session, ignore_errors=True)
    shutil.copytree(case.session, session)
    arguments = [sys.executable, "-m", "profilemate", "finalize", str(session)]
    with subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        time.sleep(after_sec)
        process.kill()
    seen["kills of the command"] += 1
    check(case, session, seen)
    seen["processes left"] += len(processes_with(session))


def live(model: Path, sessions: Path, seen: Counter[str], chance: random.Random) -> None:
    """Kill the collector beside a scheduler that runs; the tables have every step afterwards."""

    def engine(say: Say) -> None:
        with hooks_only(sessions, collector=True):
            scheduler = build_scheduler(model, 600)
            say("ready")
            say(drive(scheduler, LIVE_REQUESTS, pause_sec=0.002))

    child = Child(engine)
    child.next()
    session = only_session(sessions)
    collectors = processes_with(session)
    give_up = time.monotonic() + 60
    while not collectors and time.monotonic() < give_up:
        time.sleep(0.01)
        collectors = processes_with(session)
    time.sleep(chance.uniform(0, 1.5))
    for pid in collectors:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    steps = child.next()
    child.end()
    seen["kills of a collector beside a scheduler"] += 1
    copy = sessions / "copy"
    shutil.copytree(session, copy)
    expected = make_tables(copy, sessions / "expected") if (copy / "journal").is_dir() else None
    if not finish(session):
        seen["sessions that cannot be completed"] += 1
    tables = Tables(session)
    recorded = sum(row["repeats"] for row in tables.rows("scheduler_steps.csv"))
    seen["steps lost beside a killed collector"] += abs(steps - recorded)
    if expected is not None:
        seen["sessions that differ afterwards"] += tables.bytes_of() != expected.bytes_of()
    seen["sessions called complete with less"] += not tables.metadata["complete"]
    seen["temporary files left"] += sum(name.startswith(".") for name in os.listdir(session))
    seen["processes left"] += len(processes_with(session))
    shutil.rmtree(sessions)
