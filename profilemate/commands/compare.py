# SPDX-License-Identifier: Apache-2.0
"""``profilemate compare``: sessions side by side, the first one as the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.shared.files import writable, write
from profilemate.commands.shared.options import (
    FROM_THE_BEGINNING,
    After,
    AsJson,
    Labels,
    LastHalf,
    Period,
    RequestsAfter,
    opened,
)
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show, show_line
from profilemate.commands.shared.values import folder


@dataclass(frozen=True)
class CompareOptions:
    sessions: Annotated[
        list[Path],
        typer.Argument(
            metavar="SESSION",
            parser=folder,
            help="Sessions' folders, the baseline first. A folder of sessions stands for its "
            "newest one.",
            show_default=False,
        ),
    ]
    after: After = FROM_THE_BEGINNING
    requests_after: RequestsAfter = 0
    last_half: LastHalf = False
    period: Period = None
    labels: Labels = None
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write the comparison as an HTML page.",
            show_default=False,
        ),
    ] = None
    as_json: AsJson = False


def compare(options: CompareOptions) -> int:
    """Compare sessions with a baseline, the first of them.

    Shows the settings that differ, then each measure side by side: the change, and whether it is
    better or worse. Where two sessions are not comparable, it says why: another model, other
    requests, a session that is not complete or too short.

    \b
    Examples:
      profilemate compare ~/runs/before ~/runs/after
      profilemate compare --after 30s before after larger-pool
      profilemate compare before after --html compare.html
      profilemate compare before after --json | jq '.measures[] | {name, values}'

    \b
    Exit codes:
      0   done, whether the sessions are comparable or not
      2   no such session, a session cannot be read, or a wrong option
    """
    import analysis
    from analysis.renderers.html import compare as page
    from analysis.renderers.text import compare as text

    # Before the sessions are read, which can take a minute.
    target = None if options.html is None else writable(options.html, "--html")
    with status("reading the sessions"):
        sessions = [opened(path, options, options.labels) for path in options.sessions]
        found = analysis.compare(*sessions)
    if target is not None:
        write(target, page.render(found))
    if target is None or options.as_json:
        show(found, text.write, as_json=options.as_json)
    else:
        show_line(f"{options.html} is written")
    return 0
