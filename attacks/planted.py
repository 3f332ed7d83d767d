# SPDX-License-Identifier: Apache-2.0
"""Links in the place of everything that profilemate writes, swapped in at random moments.

A folder of a victim holds files under the same names. While sessions are completed, followed and
claimed, one process keeps putting links to it in the place of a session's names, and of the
session. Nothing in the victim's folder may change. Then processes race for one session's name, of
which another user has planted some (as root alone; else nobody plants).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.progress import track

from attacks.figure import Figure
from profilemate import collector
from profilemate.collector.__main__ import _follow
from profilemate.collector.tables import COLUMNS
from profilemate.format.errors import SessionError
from profilemate.record.claim import claim
from tests.collector.journals import EngineJournal

STEPS = 400
"""Of the session that is completed; so many that it takes longer than a swap."""

NOBODY = 65_534
RACERS = 8
SESSION_FILES = (*COLUMNS, "metadata.json", "kv_cache_summary.txt")
JOURNAL_FILES = ("session.json", "closed.json", "collector.lock", "collector.log", "collector.pid")

State = dict[str, tuple[int, int, int, bytes | str]]


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    chance = random.Random(seed)
    # Another user is to reach what is in it.
    folder.chmod(0o711)
    recorded = record(folder / "recorded")
    victim = make_victim(folder / "victim", recorded)
    before = state_of(victim)
    seen: Counter[str] = Counter()
    for _ in track(range(count // 2), "swapping", disable=not sys.stdout.isatty()):
        action = chance.choice((finalize, follow, join))
        swap(recorded, folder / "session_1", victim, action, chance, seen)
        after = state_of(victim)
        seen["files of the victim that changed"] += differences(before, after)
        if before != after:
            shutil.rmtree(victim)
            before = state_of(make_victim(victim, recorded))
    for _ in track(range(count // 2), "racing", disable=not sys.stdout.isatty()):
        race(folder / "base", victim, chance, seen)
        seen["files of the victim that changed"] += differences(before, state_of(victim))
    return [
        Figure("swaps while profilemate worked", seen["swaps"]),
        Figure("attempts that ended well", seen["went well"]),
        Figure("attempts that were refused in one line", seen["refused"]),
        Figure("races for a name", seen["races"]),
        Figure("names that others had planted", seen["planted"]),
        *(Figure(name, seen[name], most=0) for name in PROMISED),
    ]


PROMISED = (
    "files of the victim that changed",
    "files in a folder of another user",
    "other exceptions",
    "files that others may read or write",
    "races with two foundings",
    "races in which a journal is missing",
)


def record(sessions: Path) -> Path:
    engine = EngineJournal(sessions)
    for step in range(STEPS):
        engine.allocated(1_000 * step, step % 10 + 1)
        engine.flush()
    engine.killed()
    folder: Path = engine.folder
    return folder


def make_victim(victim: Path, recorded: Path) -> Path:
    """A folder that looks like a session that could be completed, with a thesis in it."""
    shutil.copytree(recorded, victim)
    for name in (*SESSION_FILES, "thesis.txt"):
        (victim / name).write_text(f"{name}\n" * 10)
    for name in (*SESSION_FILES, *JOURNAL_FILES, "thesis.txt"):
        path = victim / "journal" / name
        if not path.exists():
            path.write_text(name)
    return victim


def state_of(folder: Path) -> State:
    found: State = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        content: bytes | str = path.read_bytes() if path.is_file() else ""
        found[str(path)] = info.st_ino, info.st_mode, info.st_mtime_ns, content
    return found


def differences(before: State, after: State) -> int:
    return sum(before.get(name) != after.get(name) for name in before | after)


def finalize(session: Path) -> None:
    collector.finalize(session)


def follow(session: Path) -> None:
    if _follow(session, detached=False):
        raise SessionError("as it said")


def join(session: Path) -> None:
    """Another engine joins the session, or opens one beside it."""
    os.write(claim(session.parent, session.name, "engine1").fd, b"an event")


def swap(
    recorded: Path,
    session: Path,
    victim: Path,
    action: Callable[[Path], None],
    chance: random.Random,
    seen: Counter[str],
) -> None:
    """Work in a session while a link takes the place of one name after the other."""
    for path in session.parent.glob(f"{session.name}*"):
        shutil.rmtree(path, ignore_errors=True)
        path.unlink() if path.is_symlink() else None
    shutil.copytree(recorded, session)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        work(action, session, writing)
    os.close(writing)
    away = session.with_name("away")
    give_up = time.monotonic() + 20
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        place, target = pick(session, victim, chance)
        with contextlib.suppress(OSError):
            is_there = os.path.lexists(place)
            if is_there:
                place.rename(away)
            place.symlink_to(target)
            seen["swaps"] += 1
            time.sleep(chance.uniform(0, 0.002))
            if place.is_symlink():
                place.unlink()
            if is_there and not os.path.lexists(place):
                away.rename(place)
        remove(away)
        if time.monotonic() > give_up:
            os.kill(pid, 9)
    os.waitpid(pid, 0)
    with open(reading) as said:
        seen[said.read() or "killed"] += 1


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def pick(session: Path, victim: Path, chance: random.Random) -> tuple[Path, Path]:
    """A name, and what a link there leads to."""
    match chance.randrange(4):
        case 0:
            return session, victim
        case 1:
            return session / "journal", victim / "journal"
        case 2:
            scratch = [path for path in session.glob(".*") if path.is_dir()]
            return (chance.choice(scratch) if scratch else session / "journal-kept"), victim
    name = chance.choice((*SESSION_FILES, *JOURNAL_FILES))
    inside = session / "journal" if name in JOURNAL_FILES else session
    return inside / name, victim / "thesis.txt"


def work(action: Callable[[Path], None], session: Path, writing: int) -> None:
    """In a fork: do it, and say how that went."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    said = "went well"
    try:
        action(session)
    except SessionError as error:
        said = "refused" if "\n" not in str(error) else "other exceptions"
    except BaseException:
        said = "other exceptions"
    os.write(writing, said.encode())
    os._exit(0)


def race(base: Path, victim: Path, chance: random.Random, seen: Counter[str]) -> None:
    """Processes open one session at once, whose first names somebody else may have planted."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    base.chmod(0o1777)
    name = "session_20260131_120000_1_abcdef"
    planted = os.geteuid() == 0 and chance.random() < 0.5
    begin = time.monotonic() + 0.15
    pipes = []
    pids = []
    os.umask(0)
    planter = plant(base / name, victim, chance, begin) if planted else None
    for number in range(RACERS):
        reading, writing = os.pipe()
        pids.append(os.fork())
        if not pids[-1]:
            racer(base, name, number, begin, writing)
        os.close(writing)
        pipes.append(reading)
    for pid in filter(None, [planter, *pids]):
        os.waitpid(pid, 0)
    said = [os.read(reading, 1000).decode() for reading in pipes]
    for reading in pipes:
        os.close(reading)
    os.umask(0o022)
    seen["races"] += 1
    seen["planted"] += os.path.lexists(base / name) and (base / name).lstat().st_uid == NOBODY
    foundings = {line.split()[1] for line in said if line.startswith("in ")}
    seen["races with two foundings"] += len(foundings) > 1
    seen["other exceptions"] += sum(not line.startswith(("in ", "refused")) for line in said)
    sessions = [path for path in base.iterdir() if path.is_dir() and not path.is_symlink()]
    journals = sum(len(list(path.glob("journal/engine*.journal"))) for path in sessions)
    seen["races in which a journal is missing"] += journals != sum(
        line.startswith("in ") for line in said
    )
    for path in (path for session in sessions for path in session.rglob("*")):
        owner, around = path.lstat(), path.parent.lstat()
        is_planted = owner.st_uid == around.st_uid == NOBODY
        if not is_planted:
            seen["files in a folder of another user"] += around.st_uid == NOBODY
            seen["files that others may read or write"] += bool(owner.st_mode & 0o077)


def racer(base: Path, name: str, number: int, begin: float, writing: int) -> None:
    """In a fork: join the session."""
    while time.monotonic() < begin:
        pass
    try:
        place = claim(base, name, f"engine{number}")
        said = f"in {place.founding.key.hex()}"
    except SessionError as error:
        said = "refused" if "\n" not in str(error) else str(error)
    except BaseException as error:
        said = repr(error)
    os.write(writing, said.encode())
    os._exit(0)


def plant(place: Path, victim: Path, chance: random.Random, begin: float) -> int:
    """As another user: take the name, with a link or a folder, just before or while they race.

    Returns the process that does it.
    """
    late, what = chance.uniform(-0.03, 0.003), chance.randrange(4)
    pid = os.fork()
    if pid:
        return pid
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    while time.monotonic() < begin + late:
        pass
    with contextlib.suppress(OSError):
        match what:
            case 0:
                place.symlink_to(victim)
            case 1:
                (place / "journal").mkdir(parents=True)
                place.chmod(0o777)
                (place / "journal").chmod(0o777)
            case 2:
                place.symlink_to("/nonexistent/folder")
            case 3:
                place.write_text("")
    os._exit(0)
