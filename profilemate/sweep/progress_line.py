# SPDX-License-Identifier: Apache-2.0
"""How far is the sweep, and how long will it take? Lines on stderr: stdout is for the table."""

from __future__ import annotations

import statistics
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from analysis.wording.formats import duration
from analysis.wording.printable import printable

_LONGEST_NAME = 60


@dataclass
class Progress:
    """Writes a line when a run begins and when it ends; on a terminal its seconds count up.

    ``total``: all runs of the sweep, including those of before. ``seconds``: how long the runs took
    whose time is known.
    """

    total: int
    seconds: list[float] = field(default_factory=list)
    _status: Any = None
    _head: str = ""

    def begin(self, number: int, name: str, left: int) -> None:
        """Run ``number`` begins; ``left`` counts it and what comes after it."""
        self._head = f"[{number}/{self.total}] {_short(name)}"
        self._left = left
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status(self._head)
            self._status.start()
        else:
            _say(f"{self._head} ... {self._remaining(0)}".rstrip())

    def tick(self, seconds: float) -> None:
        """The run has taken so many seconds so far."""
        if self._status is not None:
            self._status.update(f"{self._head}  {_clock(seconds)}  {self._remaining(seconds)}")

    def end(self, seconds: float, outcome: str) -> None:
        """The run has ended."""
        self.stop()
        self.seconds.append(seconds)
        _say(f"{self._head}: {outcome}, {_clock(seconds)}")

    def ended(self, number: int, name: str, seconds: float, outcome: str) -> None:
        """A run has ended that this machine did not make."""
        _say(f"[{number}/{self.total}] {_short(name)}: {outcome}, {_clock(seconds)}")

    def stop(self) -> None:
        """No run is going on."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _remaining(self, seconds: float) -> str:
        if not self.seconds:
            return ""
        left = statistics.mean(self.seconds) * self._left - seconds
        return f"(about {_clock(max(1.0, left))} left)"


def _short(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 3]}..."


def _clock(seconds: float) -> str:
    return duration(round(seconds)) if seconds >= 120 else f"{seconds:.0f} s"


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
