# SPDX-License-Identifier: Apache-2.0
"""How are several configurations replayed side by side?"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from analysis.whatif.configuration import Configuration
from profilemate.simulation.worker import Done, Failed, Message, Progress, Task, work

END_SEC = 5


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    connection: Connection

    def end(self) -> None:
        self.process.terminate()
        self.process.join(END_SEC)
        self.connection.close()


def replay(
    task: Task,
    configurations: Sequence[Configuration],
    jobs: int,
    progress: Callable[[int, int], None] = lambda number, ended: None,
) -> list[Done | Failed]:
    """Replay each configuration, in so many processes at once; what came of them, in order.

    A process that dies takes only its configuration with it.

    Args:
        task: what the configurations have in common.
        configurations: to replay.
        jobs: how many at once.
        progress: is told the number of a configuration and how many of its requests have ended.

    """
    scratch = tempfile.TemporaryDirectory()
    waiting = deque(range(len(configurations)))
    results: dict[int, Done | Failed] = {}
    busy: dict[Connection, tuple[_Worker, int]] = {}

    def give(worker: _Worker | None) -> None:
        """Have a worker, this one or a new one, do what waits."""
        if not waiting:
            if worker:
                worker.end()
            return
        number = waiting.popleft()
        worker = worker or _start(task, Path(scratch.name) / f"{number}")
        busy[worker.connection] = worker, number
        # One that has died already is found out below.
        with suppress(BrokenPipeError):
            worker.connection.send(configurations[number])

    try:
        for _ in range(min(jobs, len(configurations))):
            give(None)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, number = busy[connection]
                message = _received(worker)
                if isinstance(message, Progress):
                    progress(number, message.ended)
                    continue
                del busy[connection]
                results[number] = message
                progress(number, len(task.workload))
                give(worker if worker.process.is_alive() else None)
    finally:
        for worker, _ in busy.values():
            worker.end()
        scratch.cleanup()
    return [results[number] for number in range(len(configurations))]


def _start(task: Task, folder: Path) -> _Worker:
    # Forked, it would have this process's threads' locks; the environment is read anew, too.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, task, folder), daemon=True)
    with _no_interrupts():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C passes by, from their first moment on: it is for this one, which
    ends them. One that comes meanwhile takes effect at the end."""
    # It comes with the first process, and lets interrupts in again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
