# SPDX-License-Identifier: Apache-2.0
"""The thread of this process that packs and writes the events of its recorders.

It works while the engine waits for its model, and a disk that does not answer holds up this thread
alone. It begins with the first step, sleeps while no step ends, and blocks all signals, so that
they reach vLLM's threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

PAUSE_SEC = 0.1
"""The pause between two writes, where no recorder wants a shorter one or the engine has no time."""

LATE_SEC = 0.003
"""A pause is late by this much where vLLM did not let go of the GIL. Python then takes it away,
after 5 ms."""


class Writer:
    """Calls ``write`` as long as that returns that there was something to write.

    ``is_idle``: nothing will be written until ``wake`` is called. ``pause_sec``: how long events
    wait to be written together. They wait longer where vLLM never waits for anything, since each
    write would then hold it up.
    """

    def __init__(self, write: Callable[[], bool]) -> None:
        self._write = write
        self._start_over()
        os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        # A fork has none of its parent's threads.
        self.is_idle = True
        self.pause_sec = PAUSE_SEC
        # Code that the garbage collector runs may ring it, even while it is being rung.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is something to write. Where no thread can start, write it here and now."""
        if self._thread is None and not self._start():
            self._write()
            return
        self.is_idle = False
        self._bell.put(None)

    def _start(self) -> bool:
        if not self._starting.acquire(blocking=False):
            return False
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="profilemate", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:
            # The system allows no more threads, or the interpreter is about to end.
            return False
        finally:
            self._starting.release()
        return True

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while True:
                self._bell.get()
                self._write_until_idle()
        finally:
            # Whatever ended this thread, the next step starts another.
            self._thread = None
            self.is_idle = True

    def _write_until_idle(self) -> None:
        pause = self.pause_sec
        while True:
            due = time.monotonic() + pause
            time.sleep(pause)
            is_late = time.monotonic() - due > LATE_SEC
            pause = min(2 * pause, PAUSE_SEC) if is_late else self.pause_sec
            if not self._write():
                self.is_idle = True
                # What came between these two lines rang no bell.
                if not self._write():
                    return
                self.is_idle = False
