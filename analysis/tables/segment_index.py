# SPDX-License-Identifier: Apache-2.0
"""What does a segment's index say, ``segment.json``?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import SessionError
from analysis.tables import index_file
from analysis.tables.faults import shown
from analysis.tables.files import opened
from analysis.tables.metadata import number, whole
from analysis.tables.schema import FORMAT_VERSION, LONGEST_SEC
from analysis.tables.unpacking import Packed
from profilemate.format.segments import INDEX_FILE

LONGEST = 1 << 20
"""More bytes are damage: it has an entry for each table."""

_CRC = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class SegmentIndex:
    """``begin_sec``, ``end_sec``: between them lie the segment's rows. ``files``: its packed files
    by name."""

    begin_sec: float
    end_sec: float
    files: Mapping[str, Packed]


def read(folder: Path) -> SegmentIndex:
    """The index of the segment in this folder.

    Raises:
        SessionError: it is missing, damaged, or of another format.
        OSError: it cannot be read.

    """
    path = folder / INDEX_FILE
    try:
        with opened(path, follow=False) as file:
            content = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise _refused(path, "it is missing") from None
    return parsed(content, path)


def parsed(content: bytes, path: Path) -> SegmentIndex:
    """The index with this content. ``path``: what errors name.

    Raises:
        SessionError: it is damaged, or of another format.

    """
    index = index_file.parsed(
        content,
        longest=LONGEST,
        key="format_version",
        version=FORMAT_VERSION,
        refused=lambda what: _refused(path, what),
    )
    begin_sec, end_sec = _time(index, "begin_sec", path), _time(index, "end_sec", path)
    tables = index.get("tables")
    if not isinstance(tables, Mapping):
        raise _refused(path, "it has no tables")
    files = {str(name): _packed(str(name), entry, path) for name, entry in tables.items()}
    return SegmentIndex(begin_sec, end_sec, files)


def _packed(name: str, entry: Any, path: Path) -> Packed:
    if not isinstance(entry, Mapping):
        raise _refused(path, f"of {shown(name)} it says nothing")
    size, crc = whole(entry.get("plain_bytes")), entry.get("crc32")
    if size is None:
        raise _refused(path, f"plain_bytes of {shown(name)} is no number of bytes")
    if not isinstance(crc, str) or _CRC.fullmatch(crc) is None:
        raise _refused(path, f"crc32 of {shown(name)} is no checksum")
    last_sec = None if entry.get("last_sec") is None else _time(entry, "last_sec", path)
    return Packed(size, int(crc, 16), last_sec)


def _time(of: Mapping[str, Any], name: str, path: Path) -> float:
    value = number(of.get(name))
    if value is None or value > LONGEST_SEC:
        raise _refused(path, f"{name} is {shown(str(of.get(name)))}, which is no time")
    return value


def _refused(path: Path, what: str) -> SessionError:
    return SessionError(f"{path}: {what}; restore the recorded file")
