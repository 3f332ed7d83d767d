# SPDX-License-Identifier: Apache-2.0
"""``profilemate export perfetto``: a session as a trace for ui.perfetto.dev."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.shared.exported import RequestsOption, WindowOption, part_of
from profilemate.commands.shared.files import writable, written
from profilemate.commands.shared.options import Period, SessionArgument, output_file
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show_line

FILE = "trace.pftrace"


@dataclass(frozen=True)
class PerfettoOptions:
    session: SessionArgument = None
    output: Annotated[Path | None, output_file("The trace's file.", FILE)] = None
    window: WindowOption = None
    requests: RequestsOption = None
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

    with status("opening the session"):
        session = open_session(options.session, period=options.period)
    path = options.output or session.outputs / FILE
    target = writable(path, "-o")
    part = part_of(options.window, options.requests)
    with status("writing the trace"), written(target) as file:
        trace.write(session, file, part, options.torch)
    show_line(str(path))
    return 0
