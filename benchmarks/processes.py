# SPDX-License-Identifier: Apache-2.0
"""Run a command to its end, and say what it took: time, processor time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TAIL_LINES = 5


@dataclass(frozen=True)
class Usage:
    """What a process and its children took."""

    wall_sec: float
    cpu_sec: float
    peak_bytes: int
    """The most memory that the largest of them held at once (resident set)."""


def measured(
    command: Sequence[str], environ: Mapping[str, str], cwd: Path, core: int | None = None
) -> Usage:
    """Run a command that has to succeed, where ``core`` is given on that one alone.

    Raises:
        BenchmarkError: it ended with another status than 0.

    """
    from benchmarks.result import BenchmarkError

    # Linux counts the memory of whoever starts a program as that program's own peak, so a bare
    # interpreter starts it, and not this process, which may be large.
    ended = subprocess.run(
        [sys.executable, "-I", "-S", __file__, "" if core is None else str(core), *command],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if ended.returncode != 0:
        tail = " | ".join((ended.stderr or ended.stdout).splitlines()[-_TAIL_LINES:])
        raise BenchmarkError(f"{' '.join(command[:4])} … ended with {ended.returncode}: {tail}")
    return Usage(**json.loads(ended.stdout.splitlines()[-1]))


def of_session(session: Path) -> list[int]:
    """The processes that collect this session beside its engines."""
    wanted = {b"--detach", os.fsencode(session)}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((process / "cmdline").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def _main(core: str, *command: str) -> int:
    if core:
        os.sched_setaffinity(0, {int(core)})
    began = time.perf_counter()
    silence = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=silence)
    _, status, usage = os.wait4(pid, 0)
    took = {
        "wall_sec": time.perf_counter() - began,
        "cpu_sec": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    print(json.dumps(took))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
