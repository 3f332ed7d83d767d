# SPDX-License-Identifier: Apache-2.0
"""Read sessions in processes of this machine.

They are spawned: Polars' threads do not outlive a fork. Where one dies, as for want of memory, its
session is read once more, in a new process; where that dies, too, only this session has failed.
With one job this process reads them itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from analysis.fleet.merging import Failed
from profilemate.fleet.order import Order
from profilemate.fleet.reading import Read, read
from profilemate.interrupts import no_interrupts

END_SEC = 5
TRIES = 2
Task = Callable[[str], Read]

THREADS = "POLARS_MAX_THREADS"


@dataclass(frozen=True)
class _Worker:
    """A process that reads, and the pipe to it."""

    process: SpawnProcess
    connection: Connection

    def end(self) -> None:
        self.process.terminate()
        self.process.join(END_SEC)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(END_SEC)
        self.connection.close()


def read_all(paths: Sequence[str], jobs: int, task: Task = read) -> Generator[Read, None, None]:
    """What was read of each session, in their order.

    Args:
        paths: the sessions.
        jobs: how many to read at once.
        task: reads one; a function of a module, as another process imports it.

    """
    if jobs == 1:
        # As every other command: starting a process would take longer than reading a session.
        yield from map(task, paths)
        return
    order = Order(paths, jobs)
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, int]] = {}
    tries = dict.fromkeys(range(len(paths)), 0)
    try:
        while not order.is_over:
            while len(busy) < jobs and (number := order.hand_out()) is not None:
                worker = idle.pop() if idle else _started(task)
                tries[number] += 1
                with suppress(OSError):  # It has died: the wait below finds out.
                    worker.connection.send(order.path(number))
                busy[worker.connection] = worker, number
            for ready in [one for one in wait(list(busy)) if isinstance(one, Connection)]:
                worker, number = busy.pop(ready)
                try:
                    order.done(number, worker.connection.recv())
                    idle.append(worker)
                except (EOFError, OSError):
                    worker.end()
                    if tries[number] < TRIES:
                        order.again(number)
                    else:
                        order.done(number, Failed(order.path(number), _died(worker.process)))
            yield from order.take()
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.end()


def _died(process: SpawnProcess) -> str:
    code = process.exitcode or 0
    if code < 0:
        with suppress(ValueError):
            name = signal.Signals(-code).name
            hint = (
                ", perhaps for want of memory: fewer --jobs take less" if name == "SIGKILL" else ""
            )
            return f"the process that read it was ended by {name}, twice{hint}"
    return f"the process that read it ended with exit code {code}, twice"


def _started(task: Task) -> _Worker:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(there, task), daemon=True
    )
    # Ctrl-C reaches all processes of a terminal: the one that started this one ends it.
    with no_interrupts(), _one_thread():
        process.start()
    there.close()
    return _Worker(process, here)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A process that begins within uses one thread: the sessions share the processors."""
    before = os.environ.get(THREADS)
    os.environ.setdefault(THREADS, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]


def _work(connection: Connection, task: Task) -> None:
    """Read sessions until there is nobody to read them for."""
    signal.signal(signal.SIGTERM, _end)
    with suppress(EOFError, OSError):
        while True:
            connection.send(task(connection.recv()))


def _end(_: int, __: FrameType | None) -> None:
    """Ends what this process has begun, too, as completing a session. What was interrupted may make
    another error of it, which is nobody's business any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    sys.exit(1)
