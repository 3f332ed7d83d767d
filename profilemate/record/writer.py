# SPDX-License-Identifier: Apache-2.0
"""The thread of this process that packs and writes what its recorders hold.

It works while the engine waits for its model, so that the engine need not; a disk that does not
answer holds up this thread alone. It begins with the first step, sleeps while none ends, and takes
no signal, so that these reach who they are for.
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
"""Between two writes, where nobody asked for less, or the engine has no time to spare."""

LATE_SEC = 0.003
"""A pause that became longer by this: vLLM did not let go of the GIL meanwhile, and had to be made
to, which happens after 5 ms."""


class Writer:
    """Calls ``write`` as long as it returns that there was something to write.

    ``is_idle``: nothing will be written until ``wake`` is called. ``pause_sec``: how long what
    there is to write waits, to be written together; longer where vLLM never waits for anything, so
    that each write would hold it up.
    """

    def __init__(self, write: Callable[[], bool]) -> None:
        self._write = write
        self._start_over()
        os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        # A fork has none of its parent's threads.
        self.is_idle = True
        self.pause_sec = PAUSE_SEC
        # One that may be rung by what the garbage collector runs while it is.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is something to write. Where no thread can be had, it is written here and now."""
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
            # The limit of threads is reached, or the interpreter is about to end.
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
            # Whatever ended it, the next step begins another.
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
                # What came between the two rang no bell.
                if not self._write():
                    return
                self.is_idle = False
