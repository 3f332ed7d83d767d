# SPDX-License-Identifier: Apache-2.0
"""By how much do the times of two hosts' sessions differ, and how sure is that?

Each session counts seconds of its host's monotonic clock. They meet on the wall clocks, which the
collectors compared with the monotonic ones (``clock`` of metadata.json).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.tables.metadata import number, part, wall_clock


@dataclass(frozen=True)
class HostClock:
    """A session's seconds on its host's wall clock. ``origin_sec``: second 0, in seconds since
    1970. ``error_sec``: how far that may be off, as the kernel and the clock's own changes say;
    None where nothing kept the clock in time, or where that is not known."""

    origin_sec: float
    error_sec: float | None


def clock_of(metadata: Mapping[str, Any]) -> HostClock | None:
    """The clock of a session's host; None where not even the beginning is known."""
    began = wall_clock(metadata.get("started_at"))
    if began is None:
        return None
    clock = part(metadata, "clock")
    least, most = (_seconds(clock.get(f"{end}_drift_sec")) for end in ("least", "most"))
    kernel = number(clock.get("error_sec"))
    error = None if kernel is None else kernel + (most - least) / 2
    return HostClock(began + (least + most) / 2, error)


def shifts(clocks: Sequence[HostClock]) -> tuple[float, ...]:
    """What to add to the seconds of each session so that all count from the earliest origin."""
    first = min(clock.origin_sec for clock in clocks)
    return tuple(clock.origin_sec - first for clock in clocks)


def error_sec(clocks: Sequence[HostClock]) -> float | None:
    """How far the times of two of the sessions may be apart from the truth, at most: the two
    largest errors together. None where one is not known."""
    errors = sorted(clock.error_sec for clock in clocks if clock.error_sec is not None)
    return sum(errors[-2:]) if len(errors) == len(clocks) else None


def _seconds(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else 0.0
