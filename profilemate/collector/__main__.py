# SPDX-License-Identifier: Apache-2.0
"""The collector's process; ``profilemate.format.collecting`` describes the command."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

from profilemate.collector import complete_if_ended, leftovers
from profilemate.collector.follow import follow
from profilemate.collector.lock import Lock
from profilemate.collector.log import complain
from profilemate.collector.snapshots import Asked
from profilemate.format.collecting import CANNOT_COMPLETE, COMPLETE, RUNNING
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.session import JOURNAL_FOLDER

GARBAGE = 50_000
"""Objects between two runs of Python's garbage collector. Hardly any objects here refer to each
other in a circle, and at Python's own 700 each run would search the events of many frames."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    asked = Asked()
    # From the very start: who asks too early must not end the process.
    signal.signal(signal.SIGUSR2, lambda *_: setattr(asked, "now", True))
    gc.set_threshold(GARBAGE)
    match arguments:
        case ["--complete", folder]:
            return _complete(Path(folder))
        case ["--detach", folder]:
            return _follow(Path(folder), detached=True, asked=asked)
        case [folder]:
            return _follow(Path(folder), detached=False, asked=asked)
        case _:
            complain("usage: python -m profilemate.collector [--complete] SESSION")
            return 1


def _follow(path: Path, *, detached: bool, asked: Asked | None = None) -> int:
    """Follow one session to its end; returns at once where another collector does already."""
    try:
        with Folder.own(path) as session, session.folder(JOURNAL_FOLDER) as journals:
            if detached:
                if os.fork():
                    os._exit(0)
                _quieten(journals)
            with Lock(journals) as lock:
                if lock.acquire() and session.holds(journals, JOURNAL_FOLDER):
                    follow(session, journals, asked)
            leftovers.clear(session, locked=False)
    except (SessionError, OSError) as error:
        complain(str(error))
        return CANNOT_COMPLETE
    return COMPLETE


def _quieten(journals: Folder) -> None:
    """Deaf to the terminal's signals, complaints into a file of the session."""
    # Whoever starts it again is a thread that blocks them all.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    fd = journals.open("collector.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    os.close(fd)


def _complete(session: Path) -> int:
    """Complete a session that has ended; returns the exit code."""
    # Asked to end, it still removes the tables that it has begun.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return COMPLETE if complete_if_ended(session) else RUNNING
    except (SessionError, OSError) as error:
        complain(str(error))
        return CANNOT_COMPLETE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
