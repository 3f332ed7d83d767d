# SPDX-License-Identifier: Apache-2.0
"""``profilemate join``: one session out of those that a deployment left on several hosts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import SessionError
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import folder

if TYPE_CHECKING:
    from analysis.tables.session import Session


@dataclass(frozen=True)
class JoinOptions:
    sessions: Annotated[
        list[Path],
        typer.Argument(
            metavar="SESSION",
            parser=folder,
            help="The sessions' folders, or a folder of sessions: those that ran at the time of "
            "its newest one, with its deployment.",
            show_default=False,
        ),
    ]
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            parser=folder,
            help="The folder to make, which must not be there yet.",
            show_default=False,
        ),
    ]


def join(options: JoinOptions) -> int:
    """Make one session of those of a deployment on several hosts.

    Each host of a deployment writes a session of its own. The joined one has the rows of all of
    them, with the times of the earliest, and every command but fleet and metrics reads
    it. Their times meet on the hosts' wall clocks; the summary says how far these may be apart.

    \b
    Examples:
      profilemate join host-a/SESSION host-b/SESSION -o joined
      profilemate join ~/runs -o joined
                                      all hosts of the newest session
      profilemate summary joined

    \b
    Exit codes:
      0   done; the last line is the folder's path
      2   the sessions are not of one run of one deployment, or the folder cannot
          be written
    """
    target = options.output
    if target.exists() or target.is_symlink():
        raise SessionError(f"{target} is there already; name a new folder")
    with status("reading the sessions"):
        sessions = opened(options.sessions)
    scratch = target.with_name(f".{target.name}.joining")
    try:
        scratch.mkdir(mode=0o700)
        with status("joining the sessions"):
            write_joined(sessions, scratch)
        scratch.rename(target)
    except OSError as error:
        raise SessionError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show_line(str(target))
    return 0


def write_joined(sessions: Sequence[Session], folder: Path) -> None:
    """Write the joined session into an empty folder.

    Raises:
        SessionError: they are not of one run of one deployment, or cannot be read.
        OSError: it cannot be written.

    """
    from analysis.tables.joining import joined, write

    write(joined(sessions), folder)


def opened(paths: Sequence[Path]) -> list[Session]:
    """These sessions; of a folder of sessions those of its newest one's deployment and time.

    Raises:
        SessionError: there is none, or only one.

    """
    from analysis.tables.find import is_session
    from analysis.tables.session import open_session

    if len(paths) == 1 and not is_session(paths[0]):
        sessions = _of_folder(paths[0])
    else:
        sessions = [open_session(path) for path in paths]
    if len(sessions) < 2:
        raise SessionError(
            f"{sessions[0].directory} is the only session of its deployment and time there; name "
            "those of the other hosts, too"
        )
    return sessions


def _of_folder(folder: Path) -> list[Session]:
    from analysis.tables.find import find_session, sessions_in
    from analysis.tables.host_clocks import clock_of
    from analysis.tables.session import open_session

    newest = open_session(find_session(folder))
    found = [newest]
    for path in sessions_in(folder, own_first=False):
        if path == newest.directory:
            continue
        other = open_session(path)
        mine, its = clock_of(newest.metadata), clock_of(other.metadata)
        if mine is None or its is None or other.snapshot is not None:
            continue
        is_one = other.metadata.get("deployment") == newest.metadata.get("deployment")
        ends = mine.origin_sec + newest.end_sec, its.origin_sec + other.end_sec
        if is_one and its.origin_sec < ends[0] and mine.origin_sec < ends[1]:
            found.append(other)
    return found
