# SPDX-License-Identifier: Apache-2.0
"""``profilemate pause`` and ``profilemate resume``: stop recording a running vLLM, and go on."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.shared.options import SessionArgument
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import seconds
from profilemate.format.session import METADATA_FILE
from profilemate.messages import say

_POLL_SEC = 0.1


@dataclass(frozen=True)
class PauseOptions:
    session: SessionArgument = None
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="TIME",
            parser=seconds,
            help="Wait so long for vLLM's processes to do it, and say which have: 5s, 1m. "
            "0: do not wait.",
        ),
    ] = 10.0


def pause(options: PauseOptions) -> int:
    """Stop recording, while vLLM goes on.

    Each engine of the session stops recording at the end of its next step, and each worker at the
    end of its next execution. Until 'profilemate resume' they record nothing, and vLLM's methods
    are its own again. What was recorded so far stays, and can be looked at.

    An engine that has nothing to do has no step. It pauses with its next one.

    \b
    Examples:
      profilemate pause            the newest session
      profilemate pause ~/runs     the newest one in this folder

    \b
    Exit codes:
      0   asked for; where a process has not done it yet, a line on stderr says so
      2   no such session, it has ended, or it is another user's
    """
    return _ask(options, paused=True)


def resume(options: PauseOptions) -> int:
    """Go on recording after 'profilemate pause'.

    Each engine records again from the end of its next step on, after it has noted how its blocks
    and requests stand. What happened in the pause is not known: figures are of one period between
    two pauses.

    \b
    Examples:
      profilemate resume
      profilemate summary --period 1     what was recorded before the pause

    \b
    Exit codes:
      0   asked for; where a process has not done it yet, a line on stderr says so
      2   no such session, it has ended, or it is another user's
    """
    return _ask(options, paused=False)


def _ask(options: PauseOptions, *, paused: bool) -> int:
    from analysis.tables.find import find_session
    from analysis.wording.printable import printable
    from profilemate.commands.shared.running import journals_of_running
    from profilemate.format import control

    session = find_session(options.session)
    asked_at = time.time()
    with journals_of_running(session) as journals:
        control.ask(journals, paused=paused)
    word = "pause" if paused else "go on"
    with status(f"waiting for vLLM to {word}"):
        done, left, over = _wait(session, options.wait, asked_at, paused=paused)
    for name, why in over.items():
        say(f"{name}: its recording has ended ({printable(why)}); it records nothing any more")
    for name in done:
        show_line(f"{name} is paused" if paused else f"{name} records")
    if options.wait and not (done or left or over):
        say(
            f"nothing has been written to {session} since: its collector may be gone, and is "
            "started again with the next steps; vLLM has been asked all the same"
        )
    if left and options.wait:
        one = "an engine does so at the end of its next step, a worker of its next execution"
        say(f"{', '.join(left)}: not yet; {one}")
    return 0


def _wait(
    session: Path, wait_sec: float, asked_at: float, *, paused: bool
) -> tuple[list[str], list[str], dict[str, str]]:
    """The processes that have done it, and the others, once there is none or time is up; and those
    whose journal could not be written, with the reason. None of them where nothing has been written
    since that wall clock."""
    from analysis.tables.metadata import part, parts, read, text
    from analysis.tables.pauses import paused_now

    give_up = time.monotonic() + wait_sec
    real = Path(os.path.realpath(session))
    while True:
        metadata = read(real)
        running = {
            f"{process.get('role')} {process.get('rank')}": text(
                part(process, "hooks_failed").get("journal")
            )
            for process in parts(metadata, "processes")
            if process.get("ended") == "running"
        }
        over = {name: why for name, why in running.items() if why}
        are_paused = set(paused_now(metadata))
        asked = [name for name in running if name not in over]
        done = [name for name in asked if (name in are_paused) is paused]
        left = [name for name in asked if name not in done]
        is_new = _written_at(real / METADATA_FILE) >= asked_at
        if is_new and running and not left:
            return done, left, over
        if time.monotonic() >= give_up:
            return (done, left, over) if is_new else ([], [], {})
        time.sleep(_POLL_SEC)


def _written_at(path: Path) -> float:
    """The file's time; long ago where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
