# SPDX-License-Identifier: Apache-2.0
"""Start processes that Ctrl-C does not reach."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def no_interrupts() -> Iterator[None]:
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
