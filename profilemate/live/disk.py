# SPDX-License-Identifier: Apache-2.0
"""How much of the disk a session takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MOST_FILES = 50_000
"""No more are counted: a session has ten for each of its segments."""

UNSETTLED = 2
"""Of the newest segments the files may still change."""


@dataclass(frozen=True)
class Disk:
    """``bytes``: that all files take on the disk. ``files``: how many there are."""

    bytes: int
    files: int


class Measuring:
    """Measures one session again and again. A segment that is closed stays as it is."""

    def __init__(self, session: Path) -> None:
        self._session = session
        self._closed: dict[str, Disk] = {}

    def measure(self) -> Disk:
        """What the session takes now. Files that go meanwhile do not count."""
        segments = self._session / "segments"
        names = sorted(entry.name for entry in _entries(segments))
        self._closed = {name: self._closed[name] for name in names if name in self._closed}
        found = [_files_in(self._session), _files_in(segments)]
        folders = [e.name for e in _entries(self._session) if e.is_dir(follow_symlinks=False)]
        found += [_files_in(self._session / name) for name in folders if name != segments.name]
        for name in names:
            if name not in self._closed:
                if sum(part.files for part in found) > MOST_FILES:
                    break
                self._closed[name] = _files_in(segments / name)
            found.append(self._closed[name])
        for name in names[-UNSETTLED:]:
            self._closed.pop(name, None)
        return Disk(sum(part.bytes for part in found), sum(part.files for part in found))


def _files_in(folder: Path) -> Disk:
    sizes = [_bytes_of(entry) for entry in _entries(folder)]
    known = [size for size in sizes if size is not None]
    return Disk(sum(known), len(known))


def _bytes_of(entry: os.DirEntry[str]) -> int | None:
    """What the file takes; None where it is none, or has gone."""
    try:
        if entry.is_file(follow_symlinks=False):
            return 512 * entry.stat(follow_symlinks=False).st_blocks
    except OSError:
        pass
    return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in the folder, and not in one that a link leads to."""
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as entries:
            return [entry for _, entry in zip(range(MOST_FILES), entries, strict=False)]
    except OSError:
        return []
