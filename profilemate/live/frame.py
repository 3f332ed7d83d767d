# SPDX-License-Identifier: Apache-2.0
"""One frame, and then the end: as text, or as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from profilemate.format.totals import TOTALS_FILE
from profilemate.live.watching import RUNNING, View, Watcher

VERSION = 1
"""Goes up when a key changes its meaning or goes away, not when one is added."""

_LATE_SEC = 2.0
"""How long totals.json may keep us waiting beyond the interval."""
_SOON_SEC = 0.1


def views(sessions: Sequence[Path], interval: float) -> list[View]:
    """Two looks at each session, ``interval`` seconds apart; one where none of them runs."""
    watchers = [Watcher(session) for session in sessions]
    try:
        written = {session: _written_ns(session) for session in sessions}
        first = [watcher.view() for watcher in watchers]
        running = [
            session for session, view in zip(sessions, first, strict=True) if view.state == RUNNING
        ]
        if not running:
            return first
        time.sleep(interval)
        deadline = time.monotonic() + _LATE_SEC
        while time.monotonic() < deadline and any(
            _written_ns(session) == written[session] for session in running
        ):
            time.sleep(_SOON_SEC)
        return [watcher.view() for watcher in watchers]
    finally:
        for watcher in watchers:
            watcher.close()


def _written_ns(session: Path) -> int:
    """When its figures were written; 0 where there are none."""
    try:
        return (session / TOTALS_FILE).stat().st_mtime_ns
    except OSError:
        return 0


def as_json(found: Sequence[View]) -> str:
    """The views as one JSON object, indented."""
    content = {"live_version": VERSION, "sessions": [dataclasses.asdict(view) for view in found]}
    return json.dumps(content, indent=2, allow_nan=False)


def write(found: Sequence[View], out: TextIO) -> None:
    """Print the views as text: plain, and in ASCII, where it does not go to a terminal."""
    from rich.console import Console

    from profilemate.live.text import How, draw

    console = Console(file=out, highlight=False, emoji=False, markup=False)
    pretty = console.is_terminal and console.encoding.startswith("utf")
    for number, view in enumerate(found):
        if number:
            console.print()
        for line in draw(view, How(width=console.width, is_ascii=not pretty)):
            line.rstrip()
            console.print(line, soft_wrap=True)
