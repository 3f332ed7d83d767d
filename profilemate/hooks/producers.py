# SPDX-License-Identifier: Apache-2.0
"""Open a journal for an engine or a worker of this process."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from profilemate import config, hooks
from profilemate.format import processes
from profilemate.format.control import Asked
from profilemate.format.keep import DEFAULT, read_keep
from profilemate.messages import say
from profilemate.record import content_secret, launch
from profilemate.record.backlog import Backlog
from profilemate.record.claim import Place, claim, ensure_name
from profilemate.record.recorder import STEP_PAUSE_SEC, Recorder


def open_journal(
    settings: config.Config,
    producer: str,
    rank: int,
    described: dict[str, Any],
    pause_sec: float = STEP_PAUSE_SEC,
) -> tuple[Place, Recorder] | None:
    """Where this producer writes, and its recorder; None where the disk has no room.

    Args:
        settings: as the environment has them.
        producer: ``engine`` or ``worker``.
        rank: its place among the producers of its kind.
        described: what else the journal's header says about it.
        pause_sec: how long its events may wait to be written together.

    Raises:
        SessionError: the session's folder cannot be used.

    """
    header = {
        "producer": producer,
        "rank": rank,
        "pid": os.getpid(),
        "start": processes.start_of(os.getpid()),
        "hooks": [status._asdict() for status in hooks.status()],
        **described,
    }
    deployment = described.get("deployment")

    def settle() -> dict[str, str]:
        return _of_contents(settings, deployment)

    recorder = None
    name = ensure_name(os.environ)
    place = claim(settings.directory, name, f"{producer}{rank}", settings.keep, settle)
    try:
        start = partial(launch.start, place.directory)
        backlog = Backlog(place.journal, start, read_keep(settings.keep) or DEFAULT)
        full_name = f"{producer} {rank}"
        asked = Asked(place.journal.parent)
        recorder = Recorder(place.fd, header, full_name, pause_sec, place.journal, backlog, asked)
        if recorder.active:
            return place, recorder
        recorder.close()
    except Exception:
        # A journal that nobody writes would look like one that is about to begin.
        if recorder is not None:
            recorder.forget()
        place.journal.unlink(missing_ok=True)
        raise
    place.journal.unlink(missing_ok=True)
    return None


def _of_contents(settings: config.Config, deployment: str | None) -> dict[str, str]:
    """What the founding of a session says of the secret behind its content ids."""
    try:
        secret = content_secret.read(settings, deployment)
    except content_secret.SecretError as error:
        say(content_secret.problem_of(str(error)))
        return {"contents_apart": str(error)}
    return {"contents": secret.hex()} if secret else {}
