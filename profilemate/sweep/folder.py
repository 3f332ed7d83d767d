# SPDX-License-Identifier: Apache-2.0
"""What does a sweep's folder hold, and what of it is still to do?

    sweep.json                    what is swept: the command, the combinations, the repeats
    001-1_max-num-seqs=4/         a folder a run
        log.txt                   what the command wrote, stdout and stderr
        sessions/                 the sessions that it left
        result.json               what came of it; written last, so a run without it did not end
    baseline-1/                   a folder for each run of the baseline, likewise
    table.csv, runs.csv, chart.html

A sweep that was stopped goes on in its folder. It has to be the same command with at least the
same combinations. Combinations, repeats and a baseline may be added.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.errors import RuleError
from analysis.sweep import PLAN_FILE, RESULT_FILE, VERSION
from profilemate.format.files import write_atomically
from profilemate.record.redact import redact
from profilemate.sweep.settings import Settings, words

LOG_FILE = "log.txt"
SESSIONS = "sessions"

_LOCK_FILE = ".lock"
_LONGEST_SLUG = 80


@dataclass(frozen=True)
class Planned:
    """A run to make: its folder, its combination (None for the baseline), and which repeat it is,
    from 1 on."""

    folder: Path
    settings: Settings | None
    repeat: int

    @property
    def name(self) -> str:
        return "baseline" if self.settings is None else words(self.settings)


@dataclass(frozen=True)
class Plan:
    """What is swept. ``baseline``: its kind and its batch size; None without one."""

    command: tuple[str, ...]
    combinations: tuple[Settings, ...]
    repeats: int
    baseline: Mapping[str, Any] | None = None

    def runs(self, folder: Path) -> Iterator[Planned]:
        """Every run, in order: all combinations once, then all of them again. So a change on the
        machine affects every combination."""
        for repeat in range(1, self.repeats + 1):
            if self.baseline is not None:
                yield Planned(folder / f"baseline-{repeat}", None, repeat)
            for number, combination in enumerate(self.combinations, start=1):
                name = f"{number:03}-{repeat}{_slug(combination)}"
                yield Planned(folder / name, combination, repeat)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Make the folder and hold it, so that no second sweep runs in it; gives the lock's file.

    A run inherits the file and holds the lock, too: when a sweep is killed, its last run may go
    on, and would disturb the next one.

    Raises:
        RuleError: the folder cannot be made or written, holds something else, or is in use.

    """
    try:
        if folder.exists() and not folder.is_dir():
            raise RuleError(f"{folder} is a file, and runs go to a folder; name one with --output")
        if folder.is_dir() and not (folder / PLAN_FILE).exists():
            others = [child.name for child in folder.iterdir() if child.name != _LOCK_FILE]
            if others:
                raise RuleError(
                    f"{folder} holds no sweep, and has {others[0]}; give --output another folder"
                )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RuleError(f"cannot write in {folder}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 100, 0).decode(errors="replace").strip()
            raise RuleError(
                f"{folder} is in use by another sweep, or by the last run of one that was killed: "
                f"process {holder or 'unknown'}; wait for it or end it, or give --output another "
                "folder"
            ) from None
        held_by(lock, os.getpid())
        yield lock
    finally:
        os.close(lock)


def held_by(lock: int, pid: int) -> None:
    """Note the process that a sweep names where it finds the folder locked."""
    text = f"{pid}\n".encode()
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))


def agreed(folder: Path, plan: Plan) -> Plan:
    """The plan as the folder has it from now on. Combinations that are there keep their numbers.

    Raises:
        RuleError: the folder has the plan of another sweep, or something else.

    """
    path = folder / PLAN_FILE
    try:
        before = json.loads(path.read_bytes())
    except FileNotFoundError:
        before = None
    except (OSError, ValueError) as error:
        raise RuleError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if before is not None:
        plan = _continued(before, plan, folder)
    write_atomically(path, json.dumps(_plain(plan), indent=2).encode() + b"\n")
    return plan


def result_of(run: Planned) -> Mapping[str, Any] | None:
    """The run's result; None where it has not ended, or the result cannot be read or is another
    run's."""
    try:
        result = json.loads((run.folder / RESULT_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(result, dict):
        return None
    same = (result.get("settings"), result.get("repeat")) == (run.settings, run.repeat)
    return result if same else None


def make_anew(run: Planned) -> None:
    """Make an empty folder for the run, without what an earlier attempt left there."""
    if run.folder.exists():
        shutil.rmtree(run.folder)
    run.folder.mkdir(mode=0o700)


def write_result(run: Planned, result: Mapping[str, Any]) -> None:
    """Write the run's result. With it the run counts as ended."""
    content = {"result_version": VERSION, "settings": run.settings, "repeat": run.repeat, **result}
    write_atomically(run.folder / RESULT_FILE, json.dumps(content, indent=2).encode() + b"\n")


def _plain(plan: Plan) -> dict[str, Any]:
    return {
        "sweep_version": VERSION,
        "command": redact(list(plan.command)),
        "command_digest": _digest(plan.command),
        "combinations": list(plan.combinations),
        "repeats": plan.repeats,
        "baseline": plan.baseline,
    }


def _digest(command: Sequence[str]) -> str:
    """A digest of the command that covers its secrets and does not show them."""
    return hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()


def _continued(before: Any, plan: Plan, folder: Path) -> Plan:
    """The plan, if it continues the sweep of before."""
    try:
        version, digest = before["sweep_version"], before["command_digest"]
        combinations, repeats = list(before["combinations"]), int(before["repeats"])
        baseline, command = before["baseline"], " ".join(before["command"])
    except (KeyError, TypeError, ValueError):
        raise RuleError(
            f"{folder / PLAN_FILE} is not a sweep's; give --output another folder"
        ) from None
    otherwise = "give --output another folder, or run the same again to go on"
    if version != VERSION:
        raise RuleError(f"{folder} is of another profilemate's format ({version}); {otherwise}")
    if digest != _digest(plan.command):
        raise RuleError(f"{folder} holds a sweep of another command: {command}; {otherwise}")
    wanted = [dict(combination) for combination in plan.combinations]
    missing = [combination for combination in combinations if combination not in wanted]
    if missing:
        named = "; ".join(map(words, missing[:3])) + ("; ..." if missing[3:] else "")
        raise RuleError(f"{folder} holds a sweep that has {named}, too; {otherwise}")
    if repeats > plan.repeats:
        raise RuleError(f"{folder} holds a sweep with --repeat {repeats}; {otherwise}")
    if baseline is not None and baseline != plan.baseline:
        raise RuleError(f"{folder} holds a sweep with another baseline ({baseline}); {otherwise}")
    added = [combination for combination in wanted if combination not in combinations]
    return replace(plan, combinations=(*combinations, *added))


def _slug(combination: Settings) -> str:
    text = "_".join(f"{name}={value}" for name, value in combination.items())
    safe = re.sub(r"[^\w=.,+-]+", "-", text, flags=re.ASCII)
    return f"_{safe[:_LONGEST_SLUG]}" if safe else ""
