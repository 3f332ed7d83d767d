# SPDX-License-Identifier: Apache-2.0
"""Which sessions does a user mean by paths, folders, patterns and URLs?"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.errors import SessionError, unreadable
from analysis.tables.find import is_session, is_snapshot
from profilemate.format.urls import is_url, url_of

DEEPEST = 4
"""Folders below a named one that are looked into, such as fleet/deployment/host/session."""


def sessions(paths: Sequence[str]) -> tuple[list[str], int]:
    """The sessions that are meant, sorted, each once; and how many snapshots were left out.

    A path is a session's folder, a folder of sessions, however deep, a pattern of either, or the
    same as a URL of object storage. A snapshot has what its session has, too: it counts only where
    it is named itself.

    Raises:
        SessionError: there is no such path, or no session in it.

    """
    found: dict[str, str] = {}
    left_out = 0
    for path in paths:
        here = list(_at(path) if is_url(path) else _below_all(path))
        if not here:
            raise SessionError(f"no session in {path}; name a session's folder or one of sessions")
        for one, is_named in here:
            if is_snapshot(one.rpartition("/")[2]) and not is_named:
                left_out += 1
            else:
                found.setdefault(one if is_url(one) else os.path.realpath(one), one)
    return sorted(found.values()), left_out


def _at(url: str) -> Iterator[tuple[str, bool]]:
    """The URLs of the sessions there, and whether it was they that were named."""
    from analysis.tables import remote

    named = url_of(url)
    for one in remote.sessions_at(url):
        yield one, one == named


def _below_all(path: str) -> Iterator[tuple[str, bool]]:
    """The folders of the sessions, and whether it was they that were named."""
    for folder in _named(path):
        for one, is_named in _in(Path(folder)):
            yield str(one), is_named


def _named(path: str) -> list[str]:
    """The folders of this name, or of this pattern."""
    if os.path.isdir(path):
        return [path]
    matching = [one for one in sorted(glob.glob(path, recursive=True)) if os.path.isdir(one)]
    if matching:
        return matching
    if os.path.exists(path):
        raise SessionError(f"{path} is a file; name the session's folder instead")
    raise SessionError(f"there is no folder {path}; name a session's folder or one of sessions")


def _in(folder: Path) -> Iterator[tuple[Path, bool]]:
    """The sessions in this folder, or itself, and whether it was it that was named."""
    try:
        if is_session(folder):
            yield folder, True
            return
        for session in _below(folder, DEEPEST):
            yield session, False
    except OSError as error:
        raise unreadable(folder, error) from None


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for child in sorted(folder.iterdir()):
        # What begins with a dot is being made. A folder that nobody else may look into is skipped.
        if (
            child.name.startswith(".")
            or not child.is_dir()
            or not os.access(child, os.R_OK | os.X_OK)
        ):
            continue
        if is_session(child):
            yield child
        elif depth > 1 and not child.is_symlink():
            yield from _below(child, depth - 1)
