# SPDX-License-Identifier: Apache-2.0
"""Complete a session whose collector died, never started, or could not finish."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from profilemate.collector import gpu_memory
from profilemate.collector.follow import Follower, remove_journals
from profilemate.collector.lock import Lock
from profilemate.collector.tables import COLUMNS, cut_torn_row
from profilemate.format.errors import SessionError
from profilemate.format.session import METADATA_FILE

WAIT_SEC = 10.0
"""How long to wait for a collector that is finishing."""


def complete(
    folder: Path, *, wait: bool, progress: Callable[[int, int], None] | None = None
) -> bool:
    """Make all tables anew from the journals, beside the old ones, then put them in their place.

    Returns False where a process of the session, or its collector, is still at work.

    Raises:
        SessionError: the session cannot be read or written.

    """
    try:
        with Lock(folder) as lock:
            deadline = time.monotonic() + (WAIT_SEC if wait else 0)
            while not lock.acquire():
                if time.monotonic() >= deadline or not lock.path.parent.is_dir():
                    return not lock.path.parent.is_dir()
                time.sleep(0.1)
            return _complete(folder, progress)
    except OSError as error:
        raise SessionError(
            f"cannot complete {folder}: {error.strerror}: {error.filename}"
        ) from None


def _complete(folder: Path, progress: Callable[[int, int], None] | None) -> bool:
    scratch = Path(tempfile.mkdtemp(prefix=".completing-", dir=folder))
    try:
        follower = Follower(folder, scratch)
        follower.discover()
        total = sum(os.path.getsize(path) for path in follower.journals.glob("*.journal"))
        while follower.read():
            if any(producer.exhausted and producer.alive for producer in follower.ordered()):
                return False
            # No journal may still have an episode that comes before one that is applied.
            others = [p for p in follower.producers.values() if not p.exhausted]
            bounds = (p.episodes[-1].time if p.episodes else 0 for p in others)
            follower.apply(min(bounds, default=None))
            follower.tables.flush()
            if progress is not None:
                progress(sum(p.position for p in follower.producers.values()), total)
        if follower.alive or not follower.retire():
            return False
        follower.close()
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    remove_journals(folder)
    return True


def _put_in_place(scratch: Path, folder: Path) -> None:
    for table in COLUMNS:
        # The samples are in no journal: the collector that followed took them.
        if table == gpu_memory.TABLE:
            cut_torn_row(folder / table)
        elif not (scratch / table).exists():
            (folder / table).unlink(missing_ok=True)
    # metadata.json says that the tables are complete, so it comes last.
    for path in sorted(scratch.iterdir(), key=lambda path: path.name == METADATA_FILE):
        os.replace(path, folder / path.name)
