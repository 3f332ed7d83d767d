# SPDX-License-Identifier: Apache-2.0
"""Follow a session while vLLM runs: journals in, tables out, until every producer is gone."""

from __future__ import annotations

import contextlib
import time
from typing import NoReturn

from profilemate.collector import gpu_memory, leftovers
from profilemate.collector.follower import Follower
from profilemate.collector.gpu_memory import Sampler
from profilemate.collector.rotation import Rotation
from profilemate.format import session
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.keep import DEFAULT, read_keep

POLL_SEC = 0.1
METADATA_SEC = 2.0

BACKLOG_BYTES = 1 << 17
"""After a read of this much there is likely more: it is read without a pause."""

MERGE_NS = 400_000_000
"""Episodes of all producers are applied in the order of their times, so that the tables come out
the same whenever they are made. One counts as written this long after its time."""

FIRST_SEC = 60.0
"""Who starts a collector has made a journal. Where none comes for so long, it was deleted."""


def follow(folder: Folder, journals: Folder) -> None:
    """Follow the session to its end, and remove its journals when the tables are complete.

    Raises:
        SessionError: the session cannot be read, its journals were deleted meanwhile, or not all
            of them could be read.
        OSError: the tables cannot be written.

    """
    leftovers.clear(folder, locked=True)
    founding = session.read_founding(journals)
    follower = Follower(folder, folder, Sampler(founding.origin_ns), journals)
    follower.segments.clear()
    follower.resume()
    follower.tables.begin_anew(gpu_memory.TABLE)
    rotation = Rotation(follower, read_keep(founding.keep) or DEFAULT)
    began = time.monotonic()
    next_metadata = 0.0
    while True:
        follower.discover()
        # Before reading: what a producer wrote before it ended is read below.
        alive = follower.alive
        if not follower.producers:
            alive = time.monotonic() - began < FIRST_SEC
        read = follower.read()
        follower.sample()
        until = time.monotonic_ns() - MERGE_NS
        first = follower.apply(until)
        if first is not None:
            follower.lag_ns = max(follower.lag_ns, time.monotonic_ns() - first)
        if not folder.has_folder(session.JOURNAL_FOLDER):
            _end_without_journals(follower)
        rotation.turn(until)
        if time.monotonic() >= next_metadata:
            rotation.remove_old()
            follower.write(ended=False)
            next_metadata = time.monotonic() + METADATA_SEC
        if not alive and not read and follower.retire():
            break
        if read < BACKLOG_BYTES:
            time.sleep(POLL_SEC)
    if not follower.producers:
        return
    follower.segments.finish()
    follower.close()
    follower.segments.clear()
    if follower.is_damaged:
        leftovers.keep_journals(folder, journals, session.JOURNAL_FOLDER)
        raise SessionError(f"not all journals could be read: {folder.path / session.KEPT_FOLDER}")
    leftovers.remove_journals(folder, journals, session.JOURNAL_FOLDER)


def _end_without_journals(follower: Follower) -> NoReturn:
    """The folder was deleted while vLLM runs: write what has come of it, and end.

    Raises:
        SessionError: always.

    """
    # The session's own folder may be gone as well.
    with contextlib.suppress(OSError):
        follower.apply()
        follower.write(ended=False)
    raise SessionError(f"{follower.journals.path} was deleted; the tables have what came before")
