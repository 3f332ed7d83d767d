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
from queue import Empty, SimpleQueue
from typing import Protocol

PAUSE_SEC = 0.1
"""The pause between two writes, where no recorder wants a shorter one or the engine has no time."""

LATE_SEC = 0.003
"""A pause is late by this much where vLLM did not let go of the GIL. Python then takes it away,
after 5 ms."""

ATTEMPTS = 3
"""How often in a row the thread may fail before it ends."""

STUCK_SEC = 2.0
"""A disk does not answer where a write takes longer than this."""

LOOK_SEC = 0.25
"""How often a source looks that has to, while nothing is to be written."""

POLL_SEC = 0.001
"""How often the end of a journal looks whether it is there."""


class Source(Protocol):
    """What is written."""

    def write(self) -> bool:
        """Write what waits; returns whether there was anything."""

    def look(self) -> bool:
        """Look what is asked of it; returns whether to go on looking while nothing is written."""


class Writer:
    """Writes its ``sources`` as long as one of them has something to write.

    ``is_idle``: nothing will be written until ``wake`` is called. ``pause_sec``: how long events
    wait to be written together. They wait longer where vLLM never waits for anything, since each
    write would then hold it up.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
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
        # Whoever writes has it: the thread as long as it lives.
        self._writing = threading.Lock()
        self._is_written_by = 0
        self._writes = 0
        self._gave_up_at = -1
        self._beat = 0.0

    def wake(self) -> None:
        """There is something to write. Where no thread can start, write it here and now."""
        self.beat()
        # Before a thread begins, which says so when it ends.
        self.is_idle = False
        if self.has_thread or self._start():
            self._bell.put(None)
        else:
            self.is_idle = True
            self.write_here()

    def beat(self) -> None:
        """Who writes calls this before each frame."""
        self._beat = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether the disk does not answer."""
        return not self.is_idle and time.monotonic() - self._beat > STUCK_SEC

    @property
    def is_here(self) -> bool:
        """Whether this very thread is in the midst of writing.

        The garbage collector can run at any time, and find a scheduler whose end is the end of its
        journal.
        """
        return self._is_written_by == threading.get_ident()

    @property
    def has_thread(self) -> bool:
        """Whether a thread writes."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, is_done: Callable[[], bool], patience_sec: float) -> bool:
        """Have everything written at once, and wait until ``is_done``; returns whether it is.

        It does not wait for longer than ``patience_sec``, nor a second time for a write that has
        not returned since, nor where it is called in the midst of writing.
        """
        if self.is_here:
            # It writes once more when it has done this.
            self._bell.put(None)
            return False
        self.wake()
        give_up = time.monotonic() + patience_sec
        while not is_done():
            if not self.has_thread:
                self.wake()
            elif self._gave_up_at == self._writes or time.monotonic() > give_up:
                self._gave_up_at = self._writes
                return False
            time.sleep(POLL_SEC)
        return True

    def write_here(self) -> None:
        """Write everything here and now, unless another is at it."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            self._is_written_by = threading.get_ident()
            while self._write_once():
                pass
        finally:
            self._is_written_by = 0
            self._writing.release()

    def _start(self) -> bool:
        if not self._starting.acquire(blocking=False):
            return False
        try:
            if not self.has_thread:
                thread = threading.Thread(target=self._run, name="profilemate", daemon=True)
                thread.start()
                self._thread = thread
        except (RuntimeError, MemoryError):
            # The system allows no more threads, or the interpreter is about to end.
            return False
        finally:
            self._starting.release()
        return True

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            with self._writing:
                self._is_written_by = threading.get_ident()
                failures = 0
                while failures < ATTEMPTS:
                    try:
                        self._sleep()
                        self._write_until_idle()
                        failures = 0
                    except BaseException:  # noqa: PERF203
                        # What waits is still there, and a traceback would tell the user nothing.
                        failures += 1
                        self._bell.put(None)
        except BaseException:
            # The next step starts another thread.
            pass
        finally:
            self._is_written_by = 0
            self.is_idle = True

    def _sleep(self) -> None:
        """Until the bell rings."""
        while True:
            looking = [source.look() for source in self.sources.copy()]
            with contextlib.suppress(Empty):
                self._bell.get(timeout=LOOK_SEC if any(looking) else None)
                return

    def _write_once(self) -> bool:
        self.beat()
        # A list can be copied while another thread appends to it.
        written = [source.write() for source in self.sources.copy()]
        self._writes += 1
        return any(written)

    def _write_until_idle(self) -> None:
        pause = self.pause_sec
        while True:
            due = time.monotonic() + pause
            with contextlib.suppress(Empty):
                # Who waits for the end of a journal rings.
                self._bell.get(timeout=pause)
            is_late = time.monotonic() - due > LATE_SEC
            pause = min(2 * pause, PAUSE_SEC) if is_late else self.pause_sec
            if not self._write_once():
                self.is_idle = True
                # What came between these two lines rang no bell.
                if not self._write_once():
                    return
                self.is_idle = False
