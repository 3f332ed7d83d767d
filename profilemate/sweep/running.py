# SPDX-License-Identifier: Apache-2.0
"""How to run a command so that it ends, with all that it started, whatever happens?

The command leads a process group of its own, so a Ctrl-C in the terminal reaches only this process.
It then asks the whole group to end, as Ctrl-C would have done, and kills the processes that do not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

POLL_SEC = 0.1
ASKED_SEC = 30
"""How long processes may take to end when asked to: an engine lets go of its GPUs."""
LEFT_SEC = 10
"""How long processes that the command leaves behind may take to end by themselves, and then when
asked to."""


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``exit_code``: negative for a signal; None where it could not be
    started, for which ``problem`` gives the reason. ``peak_memory_bytes``: of its largest process,
    among those that it waited for. ``others_cores``: how many cores other processes kept busy
    meanwhile. ``left_behind``: processes that it left running, which were then ended.
    """

    exit_code: int | None
    seconds: float
    timed_out: bool = False
    peak_memory_bytes: int | None = None
    others_cores: float | None = None
    left_behind: int = 0
    problem: str | None = None


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    time_limit: float | None,
    lock: int,
    interrupts: Interrupts,
    began: Callable[[int], None],
    tick: Callable[[float], None],
) -> Ended:
    """Run the command to its end, its output into the log.

    Args:
        time_limit: the command is stopped after so many seconds.
        lock: a file that the command holds open as long as it runs.
        interrupts: one of these stops it.
        began: called with its process id.
        tick: called, again and again, with the seconds that it has run.

    Raises:
        KeyboardInterrupt: an interrupt came; the command has ended.

    """
    start, busy = time.monotonic(), _busy_sec()
    with interrupts.held(), log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
        except OSError as error:
            problem = f"cannot start {command[0]}: {error.strerror or error}"
            return Ended(None, 0.0, problem=problem)
        try:
            began(process.pid)
            timed_out = False
            while (used := _wait(process)) is None and not interrupts.count and not timed_out:
                seconds = time.monotonic() - start
                tick(seconds)
                timed_out = time_limit is not None and seconds > time_limit
                time.sleep(POLL_SEC)
            stopped = used is None
            if used is None:
                used = _stop(process, interrupts)
            seconds = time.monotonic() - start
            busy = _busy_sec() - busy
            left = _end_the_rest(process.pid, 0 if stopped else LEFT_SEC)
        finally:
            _signal(process.pid, signal.SIGKILL)
    return Ended(
        process.returncode,
        seconds,
        timed_out and stopped,
        peak_memory_bytes=used.peak_bytes,
        # Both are counted in ticks, too coarse for a run of a moment.
        others_cores=min(max(0.0, busy - used.cpu_sec) / seconds, len(os.sched_getaffinity(0))),
        left_behind=left,
    )


@dataclass
class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP: ``count`` of them. They raise KeyboardInterrupt, but not while a
    command starts, runs and ends: its processes must not be left behind."""

    count: int = 0
    _is_held: bool = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch them within the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._come) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only count them within the block; then raise, if any came."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self.count:
            raise KeyboardInterrupt

    def _come(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if not self._is_held:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class _Used:
    """What a process that has ended and those that it waited for used: the peak memory of the
    largest, and the processor time of all."""

    peak_bytes: int
    cpu_sec: float


def _wait(process: subprocess.Popen[bytes]) -> _Used | None:
    """What the process used; None while it runs."""
    if process.returncode is not None:
        return _Used(0, 0.0)
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if not pid:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    # Linux counts memory in KiB.
    return _Used(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)


def _busy_sec() -> float:
    """The time that the cores which this process may use have been busy, as a sum."""
    usable = os.sched_getaffinity(0)
    ticks = 0
    with open("/proc/stat") as file:
        for line in file:
            name, *counts = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in usable:
                # user, nice, system, idle, iowait, irq, softirq, steal
                ticks += sum(int(count) for at, count in enumerate(counts[:8]) if at not in (3, 4))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stop(process: subprocess.Popen[bytes], interrupts: Interrupts) -> _Used:
    """Ask the group to end, then kill it; at once where another interrupt comes."""
    before = interrupts.count
    for number in (signal.SIGINT, signal.SIGTERM):
        _signal(process.pid, number)
        deadline = time.monotonic() + ASKED_SEC
        while time.monotonic() < deadline and interrupts.count == before:
            if (used := _wait(process)) is not None:
                return used
            time.sleep(POLL_SEC)
    _signal(process.pid, signal.SIGKILL)
    while (used := _wait(process)) is None:
        time.sleep(POLL_SEC)
    return used


def _end_the_rest(group: int, patience: float) -> int:
    """End what is left of the group after this time; returns how many processes that were."""
    left = _wait_for_none(group, patience)
    if left:
        _signal(group, signal.SIGTERM)
        if _wait_for_none(group, LEFT_SEC):
            _signal(group, signal.SIGKILL)
    return left


def _wait_for_none(group: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while members := _members(group):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SEC)
    return members


def _members(group: int) -> int:
    """How many processes of the group are alive."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                found += int(its_group) == group and state not in "ZX"
    return found


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
