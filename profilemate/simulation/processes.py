# SPDX-License-Identifier: Apache-2.0
"""How are several configurations simulated side by side?"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
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


def simulate(
    task: Task,
    configurations: Sequence[Configuration],
    jobs: int,
    progress: Callable[[int, int], None] = lambda number, ended: None,
) -> list[Done | Failed]:
    """Simulate each configuration, several at once; the results come in their order.

    Where a process dies, only its configuration fails.

    Args:
        task: what the configurations have in common.
        configurations: which to simulate.
        jobs: how many at once.
        progress: called with the number of a configuration and how many of its requests have ended.

    """
    scratch = tempfile.TemporaryDirectory()
    waiting = deque(range(len(configurations)))
    results: dict[int, Done | Failed] = {}
    busy: dict[Connection, tuple[_Worker, int]] = {}

    def give(worker: _Worker | None) -> None:
        """Give the next configuration to this worker, or to a new one."""
        if not waiting:
            if worker:
                worker.end()
            return
        number = waiting.popleft()
        worker = worker or _start(task, Path(scratch.name) / f"{number}")
        busy[worker.connection] = worker, number
        # The loop below finds out about a worker that has died already.
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
    # A fork would inherit the locks of this process's threads, and its environment.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, task, folder), daemon=True)
    with _no_interrupts():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C from their first moment on: this one ends them. A Ctrl-C
    that comes meanwhile takes effect at the end."""
    # Python starts it with the first process, and it would let interrupts in again.
    resource_tracker.ensure_running()
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    # The mask is for the processes. Here another thread may take the signal, and the handler runs.
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(1)) if is_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


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
