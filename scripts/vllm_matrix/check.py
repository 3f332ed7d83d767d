# SPDX-License-Identifier: Apache-2.0
"""Is what profilemate records of one release exact?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from scripts.vllm_matrix.compare import differences

ROOT = Path(__file__).resolve().parent.parent.parent
DRIVE_SECONDS = 1_800
COLLECT_SECONDS = 60
START_SECONDS = 5
"""Within this time a collector that was started can be recognized."""


class Verdict(Enum):
    """What came of a release."""

    EXACT = "exact"
    DEGRADED = "degraded"
    UNTRIED = "cannot be tried"


@dataclass(frozen=True)
class Result:
    """What came of a release: the cases that were run, and why it is not exact.

    ``evictions``, ``preemptions`` and ``reused`` (blocks) say how much of it there was in all
    cases together. ``facts`` has in words what the release does, by fact.
    """

    version: str
    verdict: Verdict
    cases: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    evictions: int = 0
    preemptions: int = 0
    reused: int = 0
    facts: dict[str, str] = field(default_factory=dict)


def check(version: str, files: Path | None, cases: Sequence[str], scratch: Path) -> Result:
    """Drive the release whose package is in ``files`` (None: the installed one), and compare.
    ``cases`` are what ``drive`` takes behind the folder."""
    empty = scratch / "empty"
    empty.mkdir(parents=True)
    command = [sys.executable, "-m", "scripts.vllm_matrix.drive", str(scratch), *cases]
    try:
        done = subprocess.run(
            command,
            cwd=empty,
            env=_environment(files, scratch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DRIVE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(version, Verdict.UNTRIED, reasons=(f"not done in {DRIVE_SECONDS} s",))
    (scratch / "log").write_text(done.stdout)
    if done.returncode:
        return Result(version, Verdict.UNTRIED, reasons=(_last_line(done.stdout),))
    names = [case for case in cases if not case.startswith("--")]
    result = _compared(version, [scratch / name for name in names])
    return replace(result, facts=json.loads((scratch / "facts.json").read_text()))


def _environment(files: Path | None, scratch: Path) -> dict[str, str]:
    path = [str(ROOT)] + ([str(files)] if files else [])
    inherited = {
        name: value
        for name, value in os.environ.items()
        # A release's files are compiled once, not each time.
        if not name.startswith("VLLM_") and name != "PYTHONDONTWRITEBYTECODE"
    }
    return inherited | {
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm-cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Those of the installed release do not fit others.
        "VLLM_PLUGINS": "",
    }


def _compared(version: str, folders: list[Path]) -> Result:
    reasons: list[str] = []
    ran, evictions, preemptions, reused = [], 0, 0, 0
    for folder in folders:
        error = folder / "error.txt"
        if error.exists():
            reasons.append(f"{folder.name}: {_last_line(error.read_text())}")
            continue
        seen = json.loads((folder / "counts.json").read_text())
        if seen is None:
            # The release has nothing of the kind.
            continue
        ran.append(folder.name)
        session = _settled(folder)
        if session is None:
            reasons.append(f"{folder.name}: no complete session")
            continue
        reasons += [f"{folder.name}: {line}" for line in differences(session, seen)]
        evictions += sum(len(pool["evicted"]) for pool in seen["pools"])
        preemptions += len(seen["preempted"])
        reused += sum(pool["reused"] for pool in seen["pools"])
    verdict = Verdict.DEGRADED if reasons else Verdict.EXACT
    return Result(version, verdict, tuple(ran), tuple(reasons), evictions, preemptions, reused)


def _settled(folder: Path) -> Path | None:
    """The session in this folder, once its collector has ended it; None where none comes.

    The process that recorded has ended, so nothing begins any more.
    """
    session = next(folder.glob("session_*"), None)
    if session is None:
        return None
    began, lock = time.monotonic(), session / "journal" / "collector.lock"
    while (waited := time.monotonic() - began) < COLLECT_SECONDS:
        metadata = session / "metadata.json"
        if metadata.exists() and json.loads(metadata.read_text())["ended_at"]:
            return session
        if waited > START_SECONDS and not lock.exists():
            return None
        time.sleep(0.1)
    return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
