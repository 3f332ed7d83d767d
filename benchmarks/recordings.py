# SPDX-License-Identifier: Apache-2.0
"""Journals of a real scheduler under the trace in tests/data, kept for the next benchmark."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import environment, sessions
from benchmarks.command import progress
from benchmarks.processes import Usage, measured
from benchmarks.result import BenchmarkError

BLOCKS = 1_000
"""Of the pool."""

_MOVES = frozenset(("allocate", "reuse", "free", "cache"))

COLLECTOR = ("-m", "profilemate.collector")
"""The program that runs beside an engine."""
FINALIZE = ("-c", "from profilemate.cli import main; main()", "finalize")
"""The command that completes a session that was cut off."""


def recorded(passes: Sequence[int], number: int = 1) -> list[Path]:
    """Sessions with the trace run so many times over, with other contents each time.

    They are made once for each state of the code that records, and are not to be changed. The
    ``number`` sets recordings of the same load apart.

    Raises:
        BenchmarkError: they could not be recorded.

    """
    wanted = f"x{'-'.join(map(str, passes))}-{number}"
    folder = environment.cache() / f"journals-{_recording_code()}-{wanted}"
    if not folder.exists():
        progress(f"recording the trace {max(passes)} times (kept in {folder.parent.name})")
        for outdated in folder.parent.glob(f"journals-*-{wanted}"):
            shutil.rmtree(outdated)
        _record(folder, passes)
    return [folder / str(number) for number in passes]


def _record(folder: Path, passes: Sequence[int]) -> None:
    environment.need_vllm()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="recording-") as scratch:
        base, copies = Path(scratch, "sessions"), Path(scratch, "copies")
        copies.mkdir()
        numbers = [str(number) for number in passes]
        command = ["-m", "benchmarks.driver", "trace", str(copies), "--passes", *numbers]
        ended = subprocess.run(
            [sys.executable, *command, "--blocks", str(BLOCKS)],
            cwd=environment.ROOT,
            env=environment.variables(base),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if ended.returncode != 0 or len(list(copies.iterdir())) != len(passes):
            raise BenchmarkError(f"the trace was not recorded (status {ended.returncode})")
        os.rename(copies, folder)


def _recording_code() -> str:
    """Stands for the state of all code that has a part in what a journal holds."""
    package = environment.ROOT / "profilemate"
    known = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), environment.ROOT / "benchmarks" / "driver.py"]:
        if path.relative_to(environment.ROOT).parts[1] not in ("collector", "commands"):
            known.update(path.read_bytes())
    return known.hexdigest()[:12]


def journal_bytes(session: Path) -> int:
    """The size of a session's journals."""
    return sum(path.stat().st_size for path in session.glob("journal/*.journal"))


def complete(
    recording: Path, target: Path, program: Sequence[str] = COLLECTOR, **variables: str
) -> Usage:
    """Copy a recorded session to ``target``, and have a program of ours complete its tables on one
    core, with these variables in its environment.

    Raises:
        BenchmarkError: it failed.

    """
    shutil.copytree(recording, target)
    environ = {**environment.variables(target.parent), **variables}
    command = [sys.executable, *program, str(target)]
    usage = measured(command, environ, environment.ROOT, core=core())
    if not sessions.metadata(target).get("ended_at"):
        raise BenchmarkError(f"{' '.join(program)} did not complete the session")
    return usage


def core() -> int:
    """The core on which programs of ours are measured."""
    return max(os.sched_getaffinity(0))


def block_events(session: Path) -> int:
    """Blocks that were allocated, reused, freed or cached, from the session's table."""
    rows = sessions.rows(session, "kv_cache_allocations")
    return sum(int(row["num_blocks"]) for row in rows if row["event"] in _MOVES)
