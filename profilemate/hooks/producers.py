# SPDX-License-Identifier: Apache-2.0
"""Open the journal of what is watched in this process: an engine or a worker."""

from __future__ import annotations

import os
from typing import Any

from profilemate import config, hooks
from profilemate.format import processes
from profilemate.record.claim import Place, claim, ensure_name
from profilemate.record.recorder import STEP_PAUSE_SEC, Recorder


def open_journal(
    settings: config.Config,
    producer: str,
    rank: int,
    described: dict[str, Any],
    pause_sec: float = STEP_PAUSE_SEC,
) -> tuple[Place, Recorder] | None:
    """Where this producer writes, and what it records into; None where the disk has no room.

    Args:
        settings: as the environment has them.
        producer: ``engine`` or ``worker``.
        rank: among those of its kind.
        described: what the journal's header says of it besides.
        pause_sec: how long its events may wait to be written together.

    Raises:
        SessionError: the session's folder cannot be used.

    """
    name = ensure_name(os.environ)
    place = claim(settings.directory, name, f"{producer}{rank}")
    header = {
        "producer": producer,
        "rank": rank,
        "pid": os.getpid(),
        "start": processes.start_of(os.getpid()),
        "hooks": [status._asdict() for status in hooks.status()],
        **described,
    }
    recorder = Recorder(place.fd, header, f"{producer} {rank}", pause_sec)
    if recorder.active:
        return place, recorder
    recorder.close()
    place.journal.unlink(missing_ok=True)
    return None
