# SPDX-License-Identifier: Apache-2.0
"""What is left of a run whose oldest segments were removed?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.tables.metadata import number, part, whole
from analysis.tables.segments import Files


@dataclass(frozen=True)
class Window:
    """``begin_sec``: when it begins, in seconds since the run began. ``removed_segments``: how many
    came before it. ``removed_bytes``: of their tables, as they were before they were packed."""

    begin_sec: float
    removed_segments: int
    removed_bytes: int


def of(files: Files, metadata: Mapping[str, Any]) -> Window | None:
    """What is left of the run; None where all of it is.

    The segments decide. What metadata.json says was written a moment before or after.
    """
    said = part(metadata, "window")
    removed_bytes = whole(said.get("removed_bytes")) or 0
    if files.segments:
        first = files.segments[0]
        if first.number == 1:
            return None
        return Window(first.index.begin_sec, first.number - 1, removed_bytes)
    begin_sec = number(said.get("begin_sec"))
    if not begin_sec or files.first == 1:
        return None
    return Window(begin_sec, whole(said.get("removed_segments")) or 0, removed_bytes)
