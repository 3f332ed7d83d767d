# SPDX-License-Identifier: Apache-2.0
"""``profilemate export perfetto``: a session as a trace for ui.perfetto.dev."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.shared.files import writable, written
from profilemate.commands.shared.options import Period, SessionArgument
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import seconds

FILE = "trace.pftrace"


@dataclass(frozen=True)
class Window:
    """Seconds since a session began; None for no limit."""

    begin_sec: float | None = None
    end_sec: float | None = None


def window(text: str) -> Window:
    """Two times, either of which may be missing.

    >>> window("10s:20s"), window("1m:")
    (Window(begin_sec=10.0, end_sec=20.0), Window(begin_sec=60.0, end_sec=None))
    """
    begin, colon, end = str(text).partition(":")
    if not colon or not (begin or end):
        raise typer.BadParameter(f"{text!r} is not a window; write 10s:20s, 10s: or :20s")
    found = Window(seconds(begin) if begin else None, seconds(end) if end else None)
    if begin and end and seconds(begin) >= seconds(end):
        raise typer.BadParameter(f"{text!r} ends before it begins; write the earlier time first")
    return found


@dataclass(frozen=True)
class Names:
    """Ids of requests."""

    ids: frozenset[str]


def names(text: str) -> Names:
    """Ids with commas between them."""
    ids = frozenset(name.strip() for name in str(text).split(",") if name.strip())
    if not ids:
        raise typer.BadParameter("no id is given; write ids of requests with commas between them")
    return Names(ids)


@dataclass(frozen=True)
class PerfettoOptions:
    session: SessionArgument = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"The trace's file. Default: {FILE} in the session's folder. "
            "Only you can read the file.",
            show_default=False,
        ),
    ] = None
    window: Annotated[
        Window | None,
        typer.Option(
            "--window",
            metavar="FROM:TO",
            parser=window,
            help="Only what is between these times since the session began: 10s:20s, 5m:, :1h. "
            "Requests that reach into it are there whole.",
            show_default=False,
        ),
    ] = None
    requests: Annotated[
        Names | None,
        typer.Option(
            "--requests",
            metavar="ID,...",
            parser=names,
            help="Only these requests, and what was evicted by them or of them. Steps, pools and "
            "GPUs are there all the same.",
            show_default=False,
        ),
    ] = None
    torch: Annotated[
        Path | None,
        typer.Option(
            "--torch",
            metavar="FILE",
            help="Put a trace of torch's profiler beside it, on the same clock: the .json or "
            ".json.gz of a profile of the same run.",
            show_default=False,
        ),
    ] = None
    period: Period = None


def perfetto(options: PerfettoOptions) -> int:
    """Write a session as a trace for ui.perfetto.dev.

    Each request that ended is a track with its phases: queued, prefill, decode, preempted. Arrows
    lead to the request that preempted it or evicted its blocks. Steps, blocks, running and waiting
    requests, captures and executions of CUDA graphs, GPU memory and marks are other tracks. It
    holds no prompt and no answer.

    \b
    Examples:
      profilemate export perfetto          the newest session, into its folder
      profilemate export perfetto ~/runs --window 10s:20s -o slow.pftrace
      profilemate export perfetto --requests cmpl-17,cmpl-42
      profilemate export perfetto --torch rank0.pt.trace.json.gz

    \b
    Exit codes:
      0   done; the last line is the trace's path
      2   no such session or request, the session or the profile cannot be
          read, the trace cannot be written, or a wrong option
    """
    # Its package may be missing, which is said before the session is read.
    from analysis import open_session
    from analysis.export import perfetto as trace
    from analysis.export.part import Part

    with status("opening the session"):
        session = open_session(options.session, period=options.period)
    path = options.output or session.directory / FILE
    target = writable(path, "-o")
    within = options.window or Window()
    chosen = options.requests.ids if options.requests else None
    part = Part(within.begin_sec, within.end_sec, chosen)
    with status("writing the trace"), written(target) as file:
        trace.write(session, file, part, options.torch)
    show_line(str(path))
    return 0
