# SPDX-License-Identifier: Apache-2.0
"""The reports that a fleet's page links to: those that are there, or new ones."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.errors import SessionError
from profilemate.commands import report
from profilemate.commands.shared.files import writable, write
from profilemate.commands.shared.progress import bars
from profilemate.format.urls import is_url
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.fleet.merging import Fleet, One

LONGEST_STEM = 100
"""Characters of a report's name that are a session's id."""


def there(found: Fleet) -> Mapping[str, Path]:
    """The reports that lie in the sessions' folders, by the session's path."""
    files = {
        one.origin.path: Path(one.origin.path, report.FILE)
        for one in found.sessions
        if not is_url(one.origin.path)
    }
    # A link in a session of somebody else's could lead to any file of this machine.
    return {path: file for path, file in files.items() if file.is_file() and not file.is_symlink()}


def written(found: Fleet, folder: Path) -> Mapping[str, Path]:
    """A new report of each session in this folder, by the session's path.

    A session whose report cannot be made is said, and left out.

    Raises:
        SessionError: the folder cannot be made, or a page cannot be written.

    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SessionError(
            f"cannot make {folder}: {error.strerror or error}; name another folder with --reports"
        ) from None
    made: dict[str, Path] = {}
    names = _names([one.origin.session_id for one in found.sessions])
    with bars(["reports"], len(found.sessions)) as show_done:
        for number, (one, name) in enumerate(zip(found.sessions, names, strict=True), start=1):
            file = folder / name
            if (page := _page(one)) is not None:
                write(writable(file, "--reports"), page)
                made[one.origin.path] = file
            show_done(0, number)
    return made


def _names(session_ids: Sequence[str]) -> list[str]:
    """A file's name for each session, no two alike: an id is what metadata.json says, and may be a
    path, or another session's."""
    names: dict[str, None] = {}
    for each in session_ids:
        stem = re.sub(r"[^\w.-]", "_", each, flags=re.ASCII).lstrip(".")[:LONGEST_STEM] or "session"
        alike = (f"{stem}-{number}.html" for number in count(2))
        names[next(name for name in chain([f"{stem}.html"], alike) if name not in names)] = None
    return [*names]


def _page(one: One) -> str | None:
    from analysis import open_session, series, summarize
    from analysis.renderers.html import page

    try:
        session = open_session(one.origin.path)
        summary = summarize(session)
        return page.render(summary, series.measure(session, summary))
    except SessionError as error:
        say(f"no report of {one.origin.path}: {error}")
        return None


def seen_from(page: Path, reports: Mapping[str, Path]) -> Mapping[str, str]:
    """Where the reports are, as links on this page."""
    base = os.path.realpath(page.parent)
    return {path: os.path.relpath(os.path.realpath(file), base) for path, file in reports.items()}
