# SPDX-License-Identifier: Apache-2.0
"""Which moments did the user mark?"""

from __future__ import annotations

from pathlib import Path

from analysis.errors import SessionError, unreadable
from analysis.tables.files import opened
from profilemate.format.marks import MARKS_FILE, MAX_BYTES, Mark, parse


def read(directory: Path) -> tuple[Mark, ...]:
    """The marks of a session, in the order of their times.

    Raises:
        SessionError: the file cannot be read.

    """
    path = directory / MARKS_FILE
    try:
        with opened(path) as file:
            content = file.read(MAX_BYTES)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise unreadable(path, error) from None
    return tuple(sorted(parse(content), key=lambda mark: mark.at_sec))


def moment_of(directory: Path, name: str) -> float:
    """When the user made the mark of this name, the last one if there are several.

    Raises:
        SessionError: there is none of this name.

    """
    marks = read(directory)
    found = [mark.at_sec for mark in marks if mark.text == name]
    if not found:
        names = ", ".join(repr(mark.text) for mark in marks[:5]) or "none"
        raise SessionError(
            f"{directory} has no mark {name!r}, and that is no time; it has {names}; write 30s, "
            "2m, 1.5h, plain seconds, or a mark's text"
        )
    return found[-1]
