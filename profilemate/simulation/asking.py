# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes of a model are asked in a process of its own, with a bound in time and memory.

It imports vLLM, and changes its answers to those of the platform that is planned. So it serves one
question, and ends. Whatever becomes of it, the plan goes on without it.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from analysis.plan.built import Built
from profilemate.simulation.classes import Asked, NotKnownError, RefusedError, build, line
from profilemate.simulation.worker import be_quiet

BOUND_SEC = 180
BOUND_BYTES = 8 << 30
"""Of the process, beyond what it reads from files. Importing vLLM takes 1 GiB of it."""

_END_SEC = 5

Answer = Built | Exception


def ask(asked: Asked, *, bound_sec: float = BOUND_SEC, bound_bytes: int = BOUND_BYTES) -> Built:
    """What vLLM's classes make of the model.

    Raises:
        RefusedError: vLLM refuses the model or the settings.
        NotKnownError: vLLM cannot say here, or not within the bounds.

    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with TemporaryDirectory() as scratch:
        arguments = (theirs, asked, Path(scratch), bound_sec, bound_bytes)
        process = context.Process(target=_work, args=arguments, daemon=True)
        # vLLM's own answers go nowhere, and nothing of ours is to be recorded from the start.
        process.start()
        theirs.close()
        try:
            answer = _answer(ours, bound_sec)
        finally:
            _end(process)
            ours.close()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(connection: Connection, bound_sec: float) -> Answer:
    if not connection.poll(bound_sec):
        return NotKnownError(f"it takes longer than {bound_sec:g} s")
    try:
        answer: Answer = connection.recv()
    except (EOFError, ConnectionResetError):
        return NotKnownError("its process ended without an answer; out of memory, perhaps")
    return answer


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End the process, and those that vLLM may have started in it."""
    if process.pid is not None and process.is_alive():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join(_END_SEC)


def _work(
    connection: Connection, asked: Asked, folder: Path, bound_sec: float, bound_bytes: int
) -> None:
    # A group of its own, to be ended as one; and it ends when the other process could not do it.
    os.setpgid(0, 0)
    signal.alarm(int(bound_sec) + _END_SEC)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    least = bound_bytes if most == resource.RLIM_INFINITY else min(bound_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (least, most))
    os.environ["TMPDIR"] = str(folder)
    be_quiet(folder)
    answer: Answer
    try:
        answer = build(asked)
    except (RefusedError, NotKnownError) as error:
        answer = error
    except MemoryError:
        answer = NotKnownError(f"it takes more than {bound_bytes >> 30} GiB")
    except Exception as error:
        answer = NotKnownError(line(error))
    with suppress(BrokenPipeError):
        connection.send(answer)
    # Without the ends of libraries, which may wait for what is not there.
    os._exit(0)
