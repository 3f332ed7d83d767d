# SPDX-License-Identifier: Apache-2.0
"""``profilemate mark``: note in a running session that something has happened."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from analysis.errors import RuleError, SessionError, unreadable
from profilemate.commands.shared.options import SessionArgument
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import is_time
from profilemate.format.folder import Folder
from profilemate.format.marks import LONGEST_TEXT, MARKS_FILE, MOST_MARKS, Mark, line, text_of_mark
from profilemate.format.session import Founding, read_founding


@dataclass(frozen=True)
class MarkOptions:
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="What has happened, such as 'deployed v2'."),
    ]
    session: SessionArgument = None


def mark(options: MarkOptions) -> int:
    """Note in a running session that something has happened now.

    The summary lists the marks, the charts of the report show them, and '--after TEXT' leaves out
    what came before one.

    \b
    Examples:
      profilemate mark "deployed v2"
      profilemate summary --after "deployed v2"

    \b
    Exit codes:
      0   done; the line that is printed is the mark
      2   no such session, it has ended, it is another user's, or it has too many
          marks
    """
    from analysis.tables.find import find_session
    from analysis.wording.formats import seconds
    from profilemate.commands.shared.running import journals_of_running

    text = text_of_mark(options.text)
    if not text or len(text) > LONGEST_TEXT or not text.isprintable():
        raise RuleError(
            f"a mark is a text of 1 to {LONGEST_TEXT} printable characters; write what has "
            "happened, such as 'deployed v2'"
        )
    if is_time(text):
        raise RuleError(
            f"{text!r} is a time, which '--after' could not tell from a mark; write what has "
            "happened, such as 'deployed v2'"
        )
    session = find_session(options.session)
    with journals_of_running(session) as journals:
        found = Mark(_now(read_founding(journals)), text)
    _append(session, found)
    show_line(f"{seconds(found.at_sec)}  {text}")
    return 0


def _now(founding: Founding) -> float:
    """Seconds since the session began."""
    if platform.node() == founding.host:
        return (time.monotonic_ns() - founding.origin_ns) / 1e9
    # Another host's monotonic clock says nothing here.
    return time.time() - founding.started_at


def _append(session: Path, found: Mark) -> None:
    try:
        with Folder.own(Path(os.path.realpath(session))) as folder:
            made = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            if folder.has(MARKS_FILE) and folder.read(MARKS_FILE).count(b"\n") >= MOST_MARKS:
                raise SessionError(f"{session} has {MOST_MARKS:,} marks, and takes no more")
            with open(folder.open(MARKS_FILE, made), "wb") as file:
                file.write(line(found))
    except OSError as error:
        raise unreadable(session, error) from None
