# SPDX-License-Identifier: Apache-2.0
"""Damage small sessions at random, and read them with every command.

A command may do its work, or say in one line on stderr what is wrong: no traceback, no hang, no
more than 2 GB. Every second session has a row that no session can have, and then the commands that
read all tables have to refuse it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from subprocess import CompletedProcess
from typing import Any

from attacks import originals
from attacks.figure import Figure
from attacks.table_damage import damage, plant

WORKERS = 2
LONGEST_SEC = 60.0
MOST_BYTES = 2 * 10**9
LIMIT_BYTES = 12 * 10**9
"""Of a process's addresses: a runaway ends before the machine has no memory left."""
EXACT = 400
"""One attempt in so many simulates vLLM, which takes seconds."""

ANSWERS = {"check": (0, 1, 2), "reconcile": (0, 1, 2)}
READS = 9
"""Of ten attempts so many read the tables alone, as all commands do: a command takes longer."""
METRICS = '# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{engine="0"} 0.0\n'


@dataclass(frozen=True)
class Attempt:
    """What became of one attempt. ``broken``: what the command did that it must not; None where
    all is well. ``refused``: it ended with its line of error."""

    number: int
    command: str
    seconds: float
    peak_bytes: int
    planted: bool
    refused: bool
    broken: str | None = None
    detail: str = ""


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    """Make so many attempts, in processes that live long."""
    sound = originals.make(folder)
    found: Counter[str] = Counter()
    slowest = most = 0.0
    began = time.monotonic()
    for attempt in _attempts(count, seed, folder, sound):
        found["attempts"] += 1
        found["planted"] += attempt.planted
        found["refused"] += attempt.refused
        slowest, most = max(slowest, attempt.seconds), max(most, attempt.peak_bytes)
        if attempt.broken:
            found[attempt.broken] += 1
            print(f"  {attempt.number} {attempt.command}: {attempt.broken}: {attempt.detail}")
        if found["attempts"] % 1000 == 0:
            print(f"  {found['attempts']:,} in {time.monotonic() - began:,.0f} s", flush=True)
    return [
        Figure("damaged sessions read", found["attempts"]),
        Figure("refused in one line", found["refused"]),
        Figure("sessions with an impossible row", found["planted"]),
        *(Figure(name, found[name], most=0) for name in ("believed", "traceback", "unclear")),
        *(Figure(name, found[name], most=0) for name in ("hang", "killed", "over 2 GB")),
        Figure("slowest", slowest, "s", LONGEST_SEC),
        Figure("most memory", most / 1e9, "GB", MOST_BYTES / 1e9),
    ]


def _attempts(count: int, seed: int, folder: Path, sound: list[Path]) -> Iterator[Attempt]:
    """The attempts as they end."""
    numbers = iter(range(count))
    working: dict[Connection, tuple[Any, int, float]] = {}

    def begin(connection: Connection, process: Any) -> None:
        number = next(numbers, None)
        if number is None:
            connection.close()
            process.join()
        else:
            connection.send(number)
            working[connection] = process, number, time.monotonic()

    for worker in range(WORKERS):
        begin(*_started(seed, folder / f"worker{worker}", sound))
    while working:
        ready = {*wait(list(working), timeout=1.0)}
        for connection in [one for one in working if one in ready]:
            process, number, _ = working.pop(connection)
            try:
                yield connection.recv()
                if number % 500 == 499:
                    # What Polars keeps of many sessions counts for none of them.
                    connection.close()
                    process.join()
                    raise EOFError
            except EOFError:
                process.join()
                if process.exitcode:
                    yield Attempt(number, "?", 0, 0, False, False, "killed", f"{process.exitcode}")
                begin(*_started(seed, folder / f"worker-{number}", sound))
            else:
                begin(connection, process)
        for connection, (process, number, at) in list(working.items()):
            if time.monotonic() - at > 2 * LONGEST_SEC:
                del working[connection]
                process.kill()
                yield Attempt(number, "?", time.monotonic() - at, 0, False, False, "hang")
                begin(*_started(seed, folder / f"worker-{number}", sound))


def _started(seed: int, folder: Path, sound: list[Path]) -> tuple[Connection, Any]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, seed, folder, sound))
    process.start()
    theirs.close()
    return ours, process


def _work(connection: Connection, seed: int, folder: Path, sound: list[Path]) -> None:
    """Make the attempts whose numbers come, until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    os.environ["VLLM_PROFILING"] = "0"
    folder.mkdir()
    while True:
        try:
            number = connection.recv()
        except EOFError:
            break
        connection.send(attempt(number, seed, folder, sound))
    shutil.rmtree(folder, ignore_errors=True)


def attempt(number: int, seed: int, folder: Path, sound: list[Path]) -> Attempt:
    """Damage a copy of a session as the number says, and read it."""
    from tests.analysis.invoke import invoke

    draw = Random(f"{seed}-{number}")
    original = draw.choice(sound)
    session = folder / "session_20260131_120000_1_aa"
    shutil.rmtree(session, ignore_errors=True)
    shutil.copytree(original, session)
    if draw.random() < 0.3:
        metadata = json.loads((session / "metadata.json").read_text())
        (session / "metadata.json").write_text(json.dumps({**metadata, "complete": False}))
    table = plant(session, draw) if number % 2 else None
    if table is None:
        damage(session, draw, draw.choice((1, 1, 1, 2, 3)))
    command = _command(number, draw, session, original, folder)
    Path("/proc/self/clear_refs").write_text("5")
    began = time.monotonic()
    broken, detail, refused = None, "", False
    try:
        ended = read(session) if command[0] == "read" else invoke(*command)
    except BaseException as error:
        broken, detail = "traceback", f"{type(error).__name__}: {error}"[:300]
    else:
        refused = ended.returncode == 2
        broken, detail = _judged(command, ended.returncode, ended.stdout, ended.stderr, table)
    seconds, peak = time.monotonic() - began, _peak()
    if seconds > LONGEST_SEC:
        broken = "hang"
    elif peak > MOST_BYTES:
        broken = "over 2 GB"
    name = " ".join(map(str, command[:3])).replace(str(folder), "")
    return Attempt(number, name, seconds, peak, table is not None, refused, broken, detail)


def read(session: Path) -> CompletedProcess[str]:
    """Read every table as commands do, and say what is wrong as they do."""
    from analysis.errors import SessionError
    from analysis.tables import facts
    from analysis.tables.schema import TABLES
    from analysis.tables.session import open_session

    try:
        opened = open_session(session)
        facts.read(opened), facts.cost(opened), facts.warnings(opened)
        for name, table in TABLES.items():
            for _ in opened.batches(name, list(table.columns)):
                pass
    except SessionError as error:
        return CompletedProcess((), 2, "", f"profilemate: {error}")
    return CompletedProcess((), 0, "", "")


def _command(
    number: int, draw: Random, session: Path, original: Path, folder: Path
) -> tuple[object, ...]:
    page, metrics = folder / "report.html", folder / "metrics.txt"
    metrics.write_text(METRICS)
    if number % 2 == 0 and draw.randrange(EXACT) == 0:
        return ("whatif", session, "--blocks", 30, "--jobs", 1)
    if draw.randrange(10) < READS:
        return ("read", session)
    readers: tuple[tuple[object, ...], ...] = (
        ("summary", session),
        ("summary", session, "--full"),
        ("summary", session, "--json"),
        ("report", session, "-o", page),
        ("compare", original, session),
        ("check", session, "--fail-if", "hit_rate<0.1", "--fail-if", "usage_peak>99%"),
    )
    others: tuple[tuple[object, ...], ...] = (
        ("plan", "--session", session, "--without-vllm"),
        ("plan", "--session", session, "--without-vllm", "--json"),
        ("whatif", session, "--fast"),
        ("whatif", session, "--fast", "--json"),
        ("reconcile", session, "--metrics-file", metrics),
        ("finalize", session),
    )
    if number % 2 or draw.random() < 0.6:
        return draw.choice(readers)
    return draw.choice(others)


def _judged(
    command: tuple[object, ...], code: int, stdout: str, stderr: str, table: str | None
) -> tuple[str | None, str]:
    """What is wrong with what a command did; None where all is well."""
    name = str(command[0])
    said = stdout + stderr
    raw = [character for character in said if ord(character) < 32 and character not in "\n\t"]
    if (
        code not in ANSWERS.get(name, (0, 2))
        or "Traceback" in said
        or raw
        or "please report" in stderr
    ):
        return "traceback", f"exit {code}, {raw[:3]}, {stderr[:300]}"
    lines = stderr.splitlines()
    if any(not line.startswith("profilemate: ") for line in lines) or (code == 2 and not lines):
        return "unclear", stderr[:300]
    if code == 2 and len(lines) > 1:
        return "unclear", stderr[:300]
    if "--json" in command and code != 2:
        json.loads(stdout, parse_constant=_no_number)
    if table is not None and (code != 2 or table not in stderr):
        return "believed", f"{table}: exit {code} {stderr[:300]}"
    return None, ""


def _no_number(text: str) -> None:
    raise ValueError(f"{text} in the JSON")


def _peak() -> int:
    """Bytes that this process, or a child that ended, took at the most since it was reset."""
    status = Path("/proc/self/status").read_text()
    own = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
