# SPDX-License-Identifier: Apache-2.0
"""When was a session recorded, where its user paused the recording?

What happened during a pause is not known, and nothing of before it says how things stood after it.
So figures are of one period between two pauses, the last one if none is asked for. Each engine
writes at the end of a pause how things stand, and what it wrote before that counts no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from analysis.errors import SessionError
from analysis.tables.metadata import listed, number, parts, whole


@dataclass(frozen=True)
class Period:
    """What was recorded between two pauses.

    ``number``: of ``count`` periods, from 1 on. ``begin_sec``: when all processes recorded;
    ``end_sec``: when the first one paused, None where none has. ``since``: by engine, the end of
    its own last pause before. ``paused_sec``: how long the pauses before and after it were, those
    that are over.
    """

    number: int
    count: int
    begin_sec: float
    end_sec: float | None
    since: Mapping[int, float]
    paused_sec: float


@dataclass(frozen=True)
class _Pause:
    role: str
    rank: int
    begin_sec: float
    end_sec: float


def period(metadata: Mapping[str, Any], asked: int | None = None) -> Period | None:
    """The period of this number, or the last one; None where the recording was never paused.

    Raises:
        SessionError: there is no period of this number.

    """
    pauses = sorted(_pauses(metadata), key=lambda pause: pause.begin_sec)
    holes = _together(pauses)
    goes_on = not holes or holes[-1][1] < inf
    count = len(holes) + goes_on
    if asked is not None and not 1 <= asked <= count:
        there = f"1 to {count}" if count > 1 else "1, as it was never paused"
        raise SessionError(f"there is no period {asked}; the recording has {there}")
    if not holes:
        return None
    place = (count if asked is None else asked) - 1
    begin = holes[place - 1][1] if place else 0.0
    end = holes[place][0] if place < len(holes) else None
    since: dict[int, float] = {}
    for pause in pauses:
        if pause.role == "engine" and pause.end_sec <= begin:
            since[pause.rank] = max(pause.end_sec, since.get(pause.rank, 0.0))
    over = sum(until - began for began, until in holes if until < inf)
    return Period(place + 1, count, begin, end, since, over)


def paused_now(metadata: Mapping[str, Any]) -> list[str]:
    """The processes whose recording has not gone on, such as ``engine 0``."""
    return [f"{pause.role} {pause.rank}" for pause in _pauses(metadata) if pause.end_sec == inf]


def _pauses(metadata: Mapping[str, Any]) -> Iterator[_Pause]:
    for process in parts(metadata, "processes"):
        role, rank = process.get("role"), whole(process.get("rank"))
        for pause in listed(process.get("pauses")):
            times = listed(pause)
            begin = number(times[0]) if times else None
            if begin is not None and rank is not None:
                end = number(times[1]) if len(times) > 1 else None
                yield _Pause(str(role), rank, begin, inf if end is None else end)


def _together(pauses: Sequence[_Pause]) -> list[tuple[float, float]]:
    """When any process had paused: processes pause one after the other."""
    holes: list[tuple[float, float]] = []
    for pause in pauses:
        if holes and pause.begin_sec <= holes[-1][1]:
            begin, end = holes.pop()
            holes.append((begin, max(end, pause.end_sec)))
        else:
            holes.append((pause.begin_sec, pause.end_sec))
    return holes
