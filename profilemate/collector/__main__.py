# SPDX-License-Identifier: Apache-2.0
"""The collector's process: ``python -m profilemate.collector SESSION``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

from profilemate.collector.follow import follow
from profilemate.collector.lock import Lock
from profilemate.format.session import JOURNAL_FOLDER

NICENESS = 10

GARBAGE = 50_000
"""Objects between two looks for those that refer to each other in a circle, which hardly any do
here: at Python's 700 each look goes through the events of many a frame that wait to be replayed."""


def main(folder: str, *, detach: bool = False) -> None:
    """Follow one session to its end; returns at once where another collector does already.

    With ``detach`` the work goes on in a process that is nobody's child, and this one ends.
    """
    if detach and os.fork():
        os._exit(0)
    session = Path(folder)
    if detach:
        _quieten(session)
    gc.set_threshold(GARBAGE)
    with Lock(session) as lock:
        if lock.acquire():
            follow(session)


def _quieten(session: Path) -> None:
    """Low priority, deaf to the terminal's signals, complaints into a file of the session."""
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    os.nice(NICENESS)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    fd = os.open(session / JOURNAL_FOLDER / "collector.log", flags, 0o600)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m profilemate.collector SESSION")
    main(sys.argv[1])
