# SPDX-License-Identifier: Apache-2.0
"""When is a snapshot taken by itself: VLLM_PROFILING_SNAPSHOT_WHEN and _LIMIT.

preemptions>20/1m               more than 20 of them in the last minute
usage>98%/30s or reset          either of them; ``docs/snapshot.md`` has what each one means
5,10m                           at most five of one session, and at least ten minutes between two
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_SEC = 3600
"""A condition looks back no further."""

MEASURES = {"preemptions": "", "usage": "%", "hit_rate": "%", "queue_p95": "s"}
"""What a condition may be about, and the unit of its limit."""
EVENTS = ("reset", "crash")
"""What fires as soon as it happens."""

PERCENT = 1_000_000
"""A limit has millionths of a percent, so that it is exact."""

_TIMES = {"s": 1, "m": 60, "h": 3600}
_UNITS = {"": 1, "%": PERCENT, "ms": 10**6, "s": 10**9, "m": 60 * 10**9}

_CONDITION = re.compile(
    r"([a-z_0-9]+)\s*([<>])\s*(\d{1,9}(?:\.\d{1,6})?)\s*(%|ms|s|m|)\s*/\s*(\d{1,6})\s*([smh])",
    re.ASCII,
)
_OR = re.compile(r"\s*\bor\b\s*", re.ASCII)
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([a-z]?)", re.ASCII)


@dataclass(frozen=True)
class Condition:
    """One condition, which an engine meets or not.

    ``limit`` is a number of preemptions, of millionths of a percent (``PERCENT``), or of
    nanoseconds. ``seconds``: how far it looks back. An event has only its name, the ``measure``.
    """

    measure: str
    above: bool = True
    limit: int = 0
    seconds: int = 0
    text: str = ""
    """As it was written, without spaces."""


@dataclass(frozen=True)
class Limit:
    """At most so many snapshots of one session, and at least so long from one to the next."""

    most: int
    between_sec: float


DEFAULT_LIMIT = Limit(5, 600.0)
DEFAULT_LAST_SEC = 600.0


class NotUnderstoodError(ValueError):
    """The text is not understood; the message says what of it, and what would be."""


def read_when(text: str) -> tuple[Condition, ...]:
    """The conditions, of which any one fires; none for an empty text.

    Raises:
        NotUnderstoodError: it is not understood.

    >>> [each.text for each in read_when("usage > 98% / 30s or reset")]
    ['usage>98%/30s', 'reset']
    """
    wanted = text.strip().lower()
    if not wanted:
        return ()
    return tuple(dict.fromkeys(map(_condition, _OR.split(wanted))))


def read_limit(text: str) -> Limit | None:
    """The limit that is asked for, with the defaults for what is not; None where it is not
    understood.

    >>> read_limit("3"), read_limit("1h"), read_limit("2, 30s"), read_limit("2m,3m")
    (Limit(most=3, between_sec=600.0), Limit(most=5, between_sec=3600.0), \
Limit(most=2, between_sec=30.0), None)
    """
    wanted = text.strip().lower()
    if not wanted:
        return DEFAULT_LIMIT
    most: int | None = None
    between: float | None = None
    for part in wanted.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            return None
        number, unit = match.groups()
        if not unit and most is None and number.isdigit() and int(number):
            most = int(number)
        elif unit in _TIMES and between is None:
            between = float(number) * _TIMES[unit]
        else:
            return None
    return Limit(
        DEFAULT_LIMIT.most if most is None else most,
        DEFAULT_LIMIT.between_sec if between is None else between,
    )


def read_last(text: str) -> float | None:
    """How many seconds before its end a snapshot covers; None where that is not understood.

    >>> read_last("90s"), read_last(""), read_last("0s"), read_last("10")
    (90.0, 600.0, None, None)
    """
    wanted = text.strip().lower()
    if not wanted:
        return DEFAULT_LAST_SEC
    match = _PART.fullmatch(wanted)
    if match is None or match[2] not in _TIMES:
        return None
    return float(match[1]) * _TIMES[match[2]] or None


def _condition(text: str) -> Condition:
    if not text:
        raise NotUnderstoodError("a condition is missing beside 'or'")
    if text in EVENTS:
        return Condition(text, text=text)
    match = _CONDITION.fullmatch(text)
    name = (match[1] if match else re.split(r"[^a-z_0-9]", text)[0])[:30]
    if name in EVENTS:
        raise NotUnderstoodError(f"{name} stands alone, without a limit")
    if name not in MEASURES:
        known = ", ".join((*MEASURES, *EVENTS))
        raise NotUnderstoodError(f"there is no '{name}', only {known}")
    unit = MEASURES[name]
    if match is None:
        raise NotUnderstoodError(f"write {name} as in {EXAMPLES[name]}")
    _, sign, number, asked_unit, count, of_time = match.groups()
    fits = asked_unit in ("ms", "s", "m") if unit == "s" else asked_unit == unit
    if not fits:
        raise NotUnderstoodError(f"write {name} as in {EXAMPLES[name]}")
    whole, _, places = number.partition(".")
    limit = int(whole + places) * _UNITS[asked_unit] // 10 ** len(places)
    if unit == "%" and limit > 100 * PERCENT:
        raise NotUnderstoodError(f"{name} is at most 100%")
    if name == "preemptions" and "." in number:
        raise NotUnderstoodError("preemptions are a whole number")
    seconds = int(count) * _TIMES[of_time]
    if not 0 < seconds <= LONGEST_SEC:
        raise NotUnderstoodError(f"{name} looks back from 1s to 1h, not {count}{of_time}")
    shown = f"{name}{sign}{number}{asked_unit}/{count}{of_time}"
    return Condition(name, sign == ">", limit, seconds, shown)


EXAMPLES = {
    "preemptions": "preemptions>20/1m",
    "usage": "usage>98%/30s",
    "hit_rate": "hit_rate<20%/5m",
    "queue_p95": "queue_p95>2s/1m",
}
"""A condition on each measure."""
