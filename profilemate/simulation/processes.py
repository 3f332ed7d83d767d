# SPDX-License-Identifier: Apache-2.0
"""How are several configurations simulated side by side?"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from analysis.whatif.configuration import Configuration
from profilemate.interrupts import no_interrupts
from profilemate.simulation.worker import Done, Failed, Message, Progress, Task, work

END_SEC = 5

LOOK_SEC = 0.2
"""A thread that waits for results looks so often whether it is to give up."""


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    connection: Connection

    def end(self) -> None:
        self.process.terminate()
        self.process.join(END_SEC)
        self.connection.close()


class OutOfTime(Exception):  # noqa: N818 - it is no error of a configuration's
    """The time for a round of simulations is over."""


class Deadline:
    """The moment at which rounds of simulations are given up: ``seconds`` after ``begin``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at: float | None = None
        self._is_over = False

    def begin(self) -> None:
        """From now on the time counts; only the first call has an effect."""
        if self._at is None:
            self._at = time.monotonic() + self._seconds

    def left(self) -> float:
        """Seconds until then, 0 where it is over."""
        if self._is_over:
            return 0.0
        return self._seconds if self._at is None else max(0.0, self._at - time.monotonic())

    def end_now(self) -> None:
        """Give up at once; any thread may say so."""
        self._is_over = True


class Simulations:
    """Processes that simulate one round of configurations after the other, and import vLLM once.

    ``jobs``: how many to simulate at once.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._scratch = tempfile.TemporaryDirectory()
        self._tasks: list[Task] = []
        self._started = 0
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, int]] = {}

    def __enter__(self) -> Simulations:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()
        self._scratch.cleanup()

    def start(self) -> None:
        """Start the processes: they can import vLLM while their task is being made."""
        while self._started < self.jobs:
            self._idle.append(self._new())

    def run(
        self,
        task: Task,
        configurations: Sequence[Configuration],
        progress: Callable[[int, int], None] = lambda number, ended: None,
        deadline: Deadline | None = None,
    ) -> list[Done | Failed]:
        """Simulate each configuration; the results come in their order.

        Where a process dies, only its configuration fails.

        Args:
            task: what the configurations have in common.
            configurations: which to simulate.
            progress: called with the number of a configuration and how many of its requests have
                ended.
            deadline: when to give up; never by default.

        Raises:
            OutOfTime: the deadline has come; no further round is possible.

        """
        path = self._file(task)
        waiting = deque(range(len(configurations)))
        results: dict[int, Done | Failed] = {}
        while waiting or self._busy:
            while waiting and len(self._busy) < self.jobs:
                number = waiting.popleft()
                self._give(number, (path, configurations[number]))
            for connection in self._wait(deadline):
                worker, number = self._busy[connection]
                message = _received(worker)
                if isinstance(message, Progress):
                    progress(number, message.ended)
                    continue
                del self._busy[connection]
                results[number] = message
                progress(number, len(task.workload))
                if worker.process.is_alive():
                    self._idle.append(worker)
        return [results[number] for number in range(len(configurations))]

    def _file(self, task: Task) -> Path:
        """The file that has the task: a pipe would wait for a process that is importing vLLM."""
        number = next((at for at, known in enumerate(self._tasks) if known is task), None)
        if number is not None:
            return Path(self._scratch.name) / f"task{number}"
        path = Path(self._scratch.name) / f"task{len(self._tasks)}"
        path.write_bytes(pickle.dumps(task))
        self._tasks.append(task)
        return path

    def _new(self) -> _Worker:
        self._started += 1
        return _start(Path(self._scratch.name) / f"{self._started}")

    def _give(self, number: int, what: tuple[Path, Configuration]) -> None:
        """Give a configuration to an idle worker, or to a new one."""
        worker = self._idle.pop() if self._idle else self._new()
        self._busy[worker.connection] = worker, number
        # ``run`` finds out about a worker that has died already.
        with suppress(BrokenPipeError):
            worker.connection.send(what)

    def _wait(self, deadline: Deadline | None) -> list[Connection]:
        """The connections with a message."""
        while True:
            left = None if deadline is None else deadline.left()
            if left == 0:
                raise OutOfTime
            found = wait(list(self._busy), None if left is None else min(left, LOOK_SEC))
            if found:
                return [one for one in found if isinstance(one, Connection)]


def simulate(
    task: Task,
    configurations: Sequence[Configuration],
    jobs: int,
    progress: Callable[[int, int], None] = lambda number, ended: None,
) -> list[Done | Failed]:
    """Simulate each configuration, ``jobs`` at once, as ``Simulations.run`` does."""
    with Simulations(min(jobs, len(configurations))) as simulations:
        return simulations.run(task, configurations, progress)


def _start(folder: Path) -> _Worker:
    # A fork would inherit the locks of this process's threads, and its environment.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, folder), daemon=True)
    with no_interrupts():
        process.start()
    theirs.close()
    return _Worker(process, ours)


def _received(worker: _Worker) -> Message:
    try:
        message: Message = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(END_SEC)
        worker.connection.close()
        return Failed(_how_it_died(worker.process.exitcode))
    return message


def _how_it_died(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    short = ": out of memory, perhaps; try fewer --jobs" if code == -signal.SIGKILL else ""
    return f"its process was ended by {name}{short}"
