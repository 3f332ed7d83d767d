# SPDX-License-Identifier: Apache-2.0
"""``profilemate compare``: sessions side by side, the first one as the baseline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.options import After, AsJson, RequestsAfter, folder, opened
from profilemate.commands.reporting import one_line
from profilemate.commands.waiting import waiting
from profilemate.commands.writing import writable, write


def compare(
    sessions: Annotated[
        list[Path],
        typer.Argument(
            metavar="SESSION",
            parser=folder,
            help="Sessions' folders, the baseline first, or folders of sessions, of which the "
            "newest is taken.",
            show_default=False,
        ),
    ],
    after: After = 0.0,
    requests_after: RequestsAfter = 0,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write the comparison as a page of its own.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare sessions with the first of them.

    What was configured otherwise, then each measure side by side, with the change and whether it
    is better or worse. It says when two sessions cannot be compared, and why: another model,
    other requests, one that is not complete or too short.

    \b
    Examples:
      profilemate compare ~/runs/before ~/runs/after
      profilemate compare --after 30s before after larger-pool
      profilemate compare before after --html compare.html
      profilemate compare before after --json | jq '.measures[] | {name, values}'

    \b
    Exit codes:
      0   done, whether they can be compared or not
      2   no such session, one that cannot be read, or a wrong option
    """
    with one_line():
        import analysis
        from analysis.renderers import json
        from analysis.renderers.html import compare as page
        from analysis.renderers.text import compare as text

        # Before the sessions are read, which can take a minute.
        target = None if html is None else writable(html, "--html")
        with waiting("reading the sessions"):
            found = analysis.compare(*(opened(path, after, requests_after) for path in sessions))
        # A name that the terminal's encoding cannot show must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        if target is not None:
            write(target, page.render(found))
        if as_json:
            print(json.render(found))
        elif html is None:
            text.write(found, sys.stdout)
        else:
            print(f"{html} is written")
