# SPDX-License-Identifier: Apache-2.0
"""``profilemate finalize``: complete the tables of a session that was cut off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from profilemate import collector
from profilemate.commands import options
from profilemate.commands.reporting import one_line

Progress = Callable[[int, int], None]


def finalize(
    session: Annotated[
        Path,
        typer.Argument(
            metavar="SESSION",
            parser=options.folder,
            help="A session's folder, or a folder of sessions, of which the newest is taken.",
            show_default=False,
        ),
    ],
) -> None:
    """Complete the tables of a session that was cut off.

    Where the collector was killed or never ran, the events are still in the session's journal;
    this replays them into the tables. A session that
    is complete stays as it is. The summary does the same by itself where it can.

    \b
    Examples:
      profilemate finalize ~/runs     the newest session in this folder
      profilemate finalize ~/runs/session_20260131_120000_4711_c0ffee

    \b
    Exit codes:
      0   the session is complete
      2   it is not: it still runs, its record has gaps, or it cannot be read
    """
    with one_line():
        from analysis.tables.find import JOURNAL, find_session

        folder = find_session(session)
        # Without a journal nothing is to be completed, and metadata.json tells all.
        if (folder / JOURNAL).is_dir():
            with _progress() as progress:
                collector.finalize(folder, progress)
        _say_gaps(folder)
        print(f"{folder} is complete")


def _say_gaps(folder: Path) -> None:
    """A session with gaps cannot be completed, as nothing holds what is missing.

    Raises:
        SessionError: it is such a session.

    """
    from analysis import SessionError, open_session

    session = open_session(folder, complete=False)
    if session.state != "complete":
        raise SessionError(
            f"{folder} cannot be completed: {session.note}; 'profilemate summary' shows what is "
            "there"
        )


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show the bytes of journal that have been replayed, on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("replaying the journal", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task("")
        yield lambda done, total: display.update(task, completed=done, total=total)
