# SPDX-License-Identifier: Apache-2.0
"""``profilemate live``: what running sessions do now."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from analysis.errors import SessionError
from profilemate.commands.shared.options import AsJson
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import folder, seconds
from profilemate.installing import pip_install

SHORTEST_SEC, LONGEST_SEC = 0.2, 3600.0


def interval(text: str) -> float:
    """Seconds between two looks.

    >>> interval("2s")
    2.0
    """
    value = seconds(text)
    if not SHORTEST_SEC <= value <= LONGEST_SEC:
        raise typer.BadParameter(
            f"{text!r} is no interval; write {SHORTEST_SEC:g} to {LONGEST_SEC:g} seconds"
        )
    return value


@dataclass(frozen=True)
class LiveOptions:
    sessions: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SESSION]...",
            parser=folder,
            help="Sessions' folders, or folders of sessions: of each the newest that runs. "
            "Default: the newest running session in $VLLM_PROFILING_DIR, else in vllm_profiling "
            "in the system's temporary folder.",
            show_default=False,
        ),
    ] = None
    once: Annotated[bool, typer.Option("--once", help="Print one frame as text, and end.")] = False
    as_json: AsJson = False
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="TIME",
            parser=interval,
            help="Time between two looks: 1s, 500ms, 1m. Rates come from the difference of two.",
        ),
    ] = 1.0


def live(options: LiveOptions) -> int:
    """Watch a session while vLLM runs.

    Shows blocks, hit rate, evictions, waiting requests, who holds blocks, which prefixes are found
    most, graphs, GPU memory and what recording costs: now, of the last 10 s, of the last minute and
    of the run.

    It reads a few kilobytes of the session's folder a second, and adds nothing to vLLM.

    \b
    Keys: o sort engines, h sort holders, f sort prefixes, p pause, n next
    session, s snapshot, q quit.

    \b
    Examples:
      profilemate live                  the newest session that runs
      profilemate live ~/runs/session_20260131_120000_4711_c0ffee
      profilemate live --once           one frame as text
      profilemate live --once --json | jq .sessions[0].engines[0].running

    \b
    Exit codes:
      0   done
      2   no such session, none of them can be read, or a wrong option
    """
    from profilemate.live import frame
    from profilemate.live.choosing import sessions_of
    from profilemate.live.watching import UNKNOWN

    if options.as_json and not options.once:
        raise SessionError("--json prints one frame: write --once --json")
    sessions = sessions_of(options.sessions or [])
    if not options.once:
        return _watch(sessions, options.interval)
    found = frame.views(sessions, options.interval)
    if all(view.state == UNKNOWN for view in found):
        raise SessionError("; ".join(f"{view.path}: {' '.join(view.notes)}" for view in found))
    if options.as_json:
        show_line(frame.as_json(found))
    else:
        frame.write(found, sys.stdout)
    return 0


def _watch(sessions: list[Path], every: float) -> int:
    # Textual draws on stderr, so that stdout stays free.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise SessionError("live needs a terminal; --once prints one frame as text")
    try:
        from profilemate.live.app import LiveApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise SessionError(
            f"textual is not installed: {pip_install('analysis')}; "
            "--once prints one frame without it"
        ) from None
    LiveApp(sessions, every).run()
    return 0
