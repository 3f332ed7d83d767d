# SPDX-License-Identifier: Apache-2.0
"""Give way to vLLM, as long as that leaves enough time to keep up.

Linux has a niceness for each thread, and nobody but the superuser may lower one again. So the work
is done in a thread that gives way, and where that falls behind, by the thread that never did.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10

BEHIND_SEC = 3.0
"""Who gives way and is so late gives way no more."""

CAUGHT_UP_SEC = 1.0
"""Who is only so late gives way again."""


def gently(work: Callable[[], None]) -> None:
    """Do it in a thread that gives way, and wait for it; raises what it raises."""
    with ThreadPoolExecutor(1, initializer=_give_way) as thread:
        thread.submit(work).result()


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
