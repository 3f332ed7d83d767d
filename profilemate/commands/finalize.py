# SPDX-License-Identifier: Apache-2.0
"""``profilemate finalize``: complete the tables of a session that was cut off."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from analysis.errors import SessionError
from profilemate import collector
from profilemate.commands.shared.progress import bytes_bar
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import folder


@dataclass(frozen=True)
class FinalizeOptions:
    session: Annotated[
        Path,
        typer.Argument(
            metavar="SESSION",
            parser=folder,
            help="A session's folder, or a folder of sessions: the newest one is taken.",
            show_default=False,
        ),
    ]


def finalize(options: FinalizeOptions) -> int:
    """Complete the tables of a session that was cut off.

    If the collector was killed or never started, the events are still in the session's journal.
    This command applies them to the tables. It leaves a complete session as it is, and another
    user's. Where not all of the journal could be read, it tries again. 'profilemate summary' does
    the same by itself where it can.

    \b
    Examples:
      profilemate finalize ~/runs     the newest session in this folder
      profilemate finalize ~/runs/session_20260131_120000_4711_c0ffee

    \b
    Exit codes:
      0   the session is complete
      2   the session is not complete: vLLM still runs, the record has gaps, or
          the session cannot be read
    """
    from analysis.tables.find import find_session, has_journal
    from analysis.tables.owner import another

    session = find_session(options.session)
    owner = another(session)
    # The collector follows no link to a session's folder.
    own = Path(os.path.realpath(session))
    if not has_journal(session):
        # There is nothing to apply, and metadata.json says the rest.
        collector.clear(own)
    elif owner is not None:
        raise SessionError(f"{session} belongs to {owner}; run this as that user")
    else:
        with bytes_bar("applying the journal") as shown:
            collector.finalize(own, shown)
    _refuse_gaps(session)
    show_line(f"{session} is complete")
    return 0


def _refuse_gaps(folder: Path) -> None:
    """Refuse a session with gaps: what is missing is nowhere, so nothing can complete it.

    Raises:
        SessionError: the session has gaps.

    """
    from analysis import open_session

    session = open_session(folder, complete=False)
    if session.state != "complete":
        raise SessionError(
            f"{folder} cannot be completed: {session.note}; 'profilemate summary' shows what is "
            "there"
        )
