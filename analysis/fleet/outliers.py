# SPDX-License-Identifier: Apache-2.0
"""Which replicas stand out from those that are like them?

Replicas that serve one model in one deployment are peers. Of each figure the median of the peers
is taken, and the median distance from it (MAD), which no single replica can move. A replica stands
out where it is further from the median than ``FAR`` times what the MAD would be as a standard
deviation. That is the rule of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993).
Where most peers are all but alike, a difference has to be worth a word, too: see ``Measured``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from analysis.fleet.figures import Figures
from analysis.stats.binned import Quantile

FAR = 3.5
AS_DEVIATION = 1.4826
"""A normal distribution's standard deviation is so many times its MAD."""
FEWEST = 4
"""With fewer peers nobody can say which of them is the odd one."""


@dataclass(frozen=True)
class Measured:
    """A figure by which replicas are compared. ``smallest``: a difference from the median below it
    is never named; a share for shares, and a share of the median for all else."""

    name: str
    unit: str
    smallest: float
    read: Callable[[Figures], float | Quantile | None]


MEASURED = (
    Measured("requests_per_sec", "requests/s", 0.2, lambda one: one.requests_per_sec),
    Measured("hit_rate", "share", 0.02, lambda one: one.hit_rate),
    Measured("eviction_tax", "share", 0.01, lambda one: one.eviction_tax),
    Measured("preemption_tax", "share", 0.01, lambda one: one.preemption_tax),
    Measured("usage", "share", 0.05, lambda one: one.usage),
    Measured("queue_p95", "s", 0.2, lambda one: one.queue_p95),
    Measured("first_token_p50", "s", 0.2, lambda one: one.first_token_p50),
    Measured("duration_p50", "s", 0.2, lambda one: one.duration_p50),
)


@dataclass(frozen=True)
class Outlier:
    """A replica that stands out by ``measure``: ``value`` is its figure, ``median`` and ``mad`` are
    those of its ``peers`` (it included). ``distance``: from the median, in ``AS_DEVIATION`` MADs;
    None where the MAD is 0. ``session``: the path of the one that shows it most, whose own figure
    is ``session_value``."""

    replica: str
    deployment: str | None
    model: str | None
    measure: str
    unit: str
    value: float
    median: float
    mad: float
    distance: float | None
    peers: int
    session: str
    session_value: float


@dataclass(frozen=True)
class Replica:
    """What is compared. ``sessions``: the figures of each of its sessions, by path."""

    name: str
    deployment: str | None
    model: str | None
    figures: Figures
    sessions: Mapping[str, Figures]


def find(replicas: Sequence[Replica]) -> tuple[Outlier, ...]:
    """Those that stand out, the furthest first."""
    peers: dict[tuple[str, str], list[Replica]] = {}
    for one in replicas:
        peers.setdefault((one.deployment or "", one.model or ""), []).append(one)
    found = [each for alike in peers.values() for what in MEASURED for each in _of(what, alike)]
    return tuple(
        sorted(
            found,
            key=lambda one: (
                -(one.distance or float("inf")),
                one.measure,
                one.replica,
                one.session,
            ),
        )
    )


def _of(what: Measured, alike: Sequence[Replica]) -> Iterator[Outlier]:
    known = [(one, read) for one in alike if (read := what.read(one.figures)) is not None]
    if len(known) < FEWEST:
        return
    values = [_value(read) for _, read in known]
    middle = median(values)
    mad = median(abs(value - middle) for value in values)
    smallest = what.smallest if what.unit == "share" else what.smallest * abs(middle)
    for one, read in known:
        value, off = _value(read), abs(_value(read) - middle)
        if off <= max(FAR * AS_DEVIATION * mad, smallest) or _may_be(middle, read):
            continue
        path, shown = _shown_by(what, one, middle)
        yield Outlier(
            replica=one.name,
            deployment=one.deployment,
            model=one.model,
            measure=what.name,
            unit=what.unit,
            value=value,
            median=middle,
            mad=mad,
            distance=off / (AS_DEVIATION * mad) if mad else None,
            peers=len(known),
            session=path,
            session_value=shown,
        )


def _may_be(middle: float, read: float | Quantile) -> bool:
    """Whether the median lies in the bin of the quantile, which may be no different then."""
    if not isinstance(read, Quantile):
        return False
    return read.low_sec <= middle and (read.high_sec is None or middle < read.high_sec)


def _value(read: float | Quantile) -> float:
    return read.sec if isinstance(read, Quantile) else read


def _shown_by(what: Measured, one: Replica, middle: float) -> tuple[str, float]:
    values = {
        path: _value(read)
        for path, figures in one.sessions.items()
        if (read := what.read(figures)) is not None
    }
    path = max(sorted(values), key=lambda each: abs(values[each] - middle))
    return path, values[path]
