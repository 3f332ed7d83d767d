# SPDX-License-Identifier: Apache-2.0
"""``profilemate report``: a session as one HTML page with charts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.options import After, RequestsAfter, SessionArgument, opened
from profilemate.commands.reporting import one_line
from profilemate.commands.waiting import waiting
from profilemate.commands.writing import writable, write

FILE = "report.html"


def report(
    session: SessionArgument = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"Where to write the page. Without it: {FILE} in the session's folder, which "
            "only you can read.",
            show_default=False,
        ),
    ] = None,
    after: After = 0.0,
    requests_after: RequestsAfter = 0,
) -> None:
    """Draw a session as one HTML page.

    The story and the figures first, then charts of the KV cache, the prefix cache, evictions,
    requests and the scheduler, over time. The page needs no network and no server: open it from
    disk, send it to someone, print it. It stays under 6 MB however long the session is.

    It names requests and the model, and holds no prompt and no answer.

    \b
    Examples:
      profilemate report              the newest session, into its folder
      profilemate report ~/runs/session_20260131_120000_4711_c0ffee
      profilemate report ~/runs -o monday.html
      profilemate report --after 30s  without the first half minute

    \b
    Exit codes:
      0   done; the last line is the page's path
      2   no such session, one that cannot be read, a page that cannot be
          written, or a wrong option
    """
    with one_line():
        # Before the session is read, which can take a minute: what the page needs is there.
        from analysis import series, summarize
        from analysis.renderers.html import page

        with waiting("opening the session"):
            chosen = opened(session, after, requests_after)
        path = output or chosen.directory / FILE
        target = writable(path, "-o")
        with waiting("summing up the session"):
            found = summarize(chosen)
        with waiting("reading the session for the charts"):
            drawn = series.measure(chosen, found)
        with waiting("writing the page"):
            write(target, page.render(found, drawn))
        print(path)
