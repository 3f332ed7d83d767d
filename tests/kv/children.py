# SPDX-License-Identifier: Apache-2.0
"""Children of the test process that have vLLM loaded already, because they are forks of it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Say = Callable[[Any], None]


class Child:
    """A fork that runs one function; what that says comes as JSON, a line each."""

    def __init__(self, run: Callable[[Say], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run(run, writing)
        os.close(writing)
        self._lines = open(reading, encoding="utf-8")  # noqa: SIM115 (closed by ``end``)

    def next(self) -> Any:
        """What the child says next.

        Raises:
            EOFError: it has ended.

        """
        line = self._lines.readline()
        if not line.endswith("\n"):
            raise EOFError
        return json.loads(line)

    def rest(self) -> Iterator[Any]:
        """Whatever it says until it ends."""
        with suppress(EOFError):
            while True:
                yield self.next()

    def kill(self) -> None:
        """SIGKILL: nothing of the child's runs any more."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end; returns its exit code, or less than 0 for a signal."""
        self._lines.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run(run: Callable[[Say], None], writing: int) -> None:
    code = 1
    try:
        with open(writing, "w", encoding="utf-8", buffering=1) as pipe:
            run(lambda words: print(json.dumps(words), file=pipe, flush=True))
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        # Nothing of pytest's may run here.
        os._exit(code)


@contextmanager
def said() -> Iterator[list[str]]:
    """The lines that profilemate writes to stderr inside, there once the block has ended."""
    lines: list[str] = []
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        yield lines
    finally:
        written, sys.stderr = sys.stderr.getvalue(), before
        lines += [line for line in written.splitlines() if line.startswith("profilemate: ")]


def processes_with(argument: Path) -> list[int]:
    """Processes that have this path among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(argument) in arguments:
            found.append(int(folder.name))
    return found
