# SPDX-License-Identifier: Apache-2.0
"""Ways to read a session that go wrong. Other processes import this, so it imports little."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from profilemate.fleet.reading import Read, read

PATIENCE_SEC = 120


def killed(path: str) -> Read:
    """One of the sessions kills its reader each time, and one the first time."""
    if path.endswith("_b"):
        os.kill(os.getpid(), signal.SIGKILL)
    once = Path(path, "once")
    if path.endswith("_c") and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return read(path)


def held_up(path: str) -> Read:
    """Never ends on the node of a cluster that is to be killed."""
    import ray

    notes = Path(path).parent
    if (notes / "victim").read_text() == ray.get_runtime_context().get_node_id():
        (notes / "reached").touch()
        time.sleep(10 * PATIENCE_SEC)
    return read(path)
