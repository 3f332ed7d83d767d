# SPDX-License-Identifier: Apache-2.0
"""``profilemate snapshot``: what a session has now, or its end, as a session of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.shared.options import SessionArgument
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import folder, seconds


@dataclass(frozen=True)
class SnapshotOptions:
    session: SessionArgument = None
    last: Annotated[
        float | None,
        typer.Option(
            "--last",
            metavar="TIME",
            parser=seconds,
            help="Take the segments of at least so long before the end: 30s, 10m, 1.5h. "
            "Default: all that the session has.",
            show_default=False,
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            parser=folder,
            help="The snapshot's folder, which must not exist yet. Default: beside the session, "
            "with its name and the time.",
            show_default=False,
        ),
    ] = None


def snapshot(options: SnapshotOptions) -> int:
    """Keep what a session has now, while vLLM goes on.

    A session that records for days keeps only its last part. When something has happened, this
    command makes a session of its own out of what is there: every other command reads it, and
    nothing is removed from it. Segments that are closed are linked and take no place, as long as
    the session has them, too; the rest is copied.

    Only whole segments are taken, so it may begin earlier than you ask for. A session that was
    never cut into segments is taken whole.

    \b
    Examples:
      profilemate snapshot               all of the newest session
      profilemate snapshot --last 10m    its last ten minutes, at least
      profilemate snapshot ~/runs --last 1h -o ~/kept/monday

    \b
    Exit codes:
      0   done; the last line is the snapshot's path
      2   no such session, the session cannot be read, the snapshot cannot be
          written, or a wrong option
    """
    from profilemate.commands.snapshot_folder import take

    now = datetime.now(timezone.utc)
    with status("taking a snapshot"):
        target = take(options.session, now, last_sec=options.last, target=options.output)
    show_line(str(target))
    return 0
