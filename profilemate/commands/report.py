# SPDX-License-Identifier: Apache-2.0
"""``profilemate report``: a session as one HTML page with charts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from profilemate.commands.shared.files import writable, write
from profilemate.commands.shared.options import (
    FROM_THE_BEGINNING,
    After,
    Labels,
    LastHalf,
    Period,
    RequestsAfter,
    SessionArgument,
    opened,
    output_file,
)
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.replaying import (
    USUAL_SEC,
    NoReplayOption,
    ReplayFor,
    replaying,
)

FILE = "report.html"


@dataclass(frozen=True)
class ReportOptions:
    session: SessionArgument = None
    output: Annotated[Path | None, output_file("The page's file.", FILE)] = None
    after: After = FROM_THE_BEGINNING
    requests_after: RequestsAfter = 0
    last_half: LastHalf = False
    period: Period = None
    labels: Labels = None
    no_replay: NoReplayOption = False
    replay_for: ReplayFor = USUAL_SEC


def report(options: ReportOptions) -> int:
    """Write a session as one HTML page with charts.

    The page begins with the story and the main figures. Charts follow: the KV cache, the prefix
    cache, evictions, requests, the scheduler and CUDA graphs over time. It needs no network and
    no server: open it from disk, send it, print it. It stays under 6 MB for a session of any
    length.

    The page names the model and the requests. It holds no prompt and no answer.

    \b
    Examples:
      profilemate report              the newest session, into its folder
      profilemate report ~/runs/session_20260131_120000_4711_c0ffee
      profilemate report ~/runs -o monday.html
      profilemate report --after 30s  without the first half minute

    \b
    Exit codes:
      0   done; the last line is the page's path
      2   no such session, the session cannot be read, the page cannot be
          written, or a wrong option
    """
    # Plotly is imported before the session is read, which can take a minute.
    from analysis import series, summarize
    from analysis.renderers.html import page

    with status("opening the session"):
        session = opened(options.session, options, options.labels)
    path = options.output or session.outputs / FILE
    target = writable(path, "-o")
    trying = replaying(session, no_replay=options.no_replay, replay_for=options.replay_for)
    with trying as advice:
        with status("summarizing the session"):
            found = summarize(session)
        advice.begin(found)
        with status("reading the session for the charts"):
            drawn = series.measure(session, found)
        with status("trying the advice"):
            found = advice.result()
    with status("writing the page"):
        write(target, page.render(found, drawn))
    print(path)
    return 0
