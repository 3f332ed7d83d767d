# SPDX-License-Identifier: Apache-2.0
"""What do the partials of a fleet's sessions come to, in whatever order they come?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from analysis.fleet import figures, money, outliers
from analysis.fleet.counts import Counts
from analysis.fleet.figures import Figures
from analysis.fleet.money import Bill
from analysis.fleet.outliers import Outlier, Replica
from analysis.fleet.partial import Origin, Partial
from analysis.fleet.routing import Routing
from analysis.tables.metadata import wall_clock

UNKNOWN = "unknown"


def _hour(origin: Origin) -> str | None:
    began = wall_clock(origin.started_at) if origin.started_at else None
    if began is None:
        return None
    return datetime.fromtimestamp(began, timezone.utc).strftime("%Y-%m-%d %H:00Z")


KEYS: Mapping[str, Callable[[Origin], str | None]] = {
    "deployment": lambda origin: origin.deployment,
    "model": lambda origin: origin.model,
    "replica": lambda origin: origin.replica,
    "host": lambda origin: origin.host,
    "release": lambda origin: origin.release,
    "hour": _hour,
}
"""By what sessions can be grouped. An hour is that in which a session began, in UTC."""


@dataclass(frozen=True)
class Failed:
    """A session that is not in the figures, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Double:
    """A session that is at another path, too: ``same_as``, which counts."""

    path: str
    same_as: str


@dataclass(frozen=True)
class One:
    """One session in short."""

    origin: Origin
    requests: int
    figures: Figures
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Sessions that have the same key. ``replicas``: how many left them. ``deployment`` and
    ``model``: of its sessions, None where they have several. ``bill``: None without a price."""

    name: str
    deployment: str | None
    model: str | None
    replicas: int
    counts: Counts
    figures: Figures
    bill: Bill | None


@dataclass(frozen=True)
class Fleet:
    """All sessions of a fleet. ``by``: what ``groups`` are by. ``groups``, ``replicas`` and
    ``sessions`` are sorted by name, ``sessions`` by path. ``routing``: see there. ``failed``:
    sessions that could not be read; they are in no figure. ``doubles``: paths of sessions that
    count by another path."""

    by: str
    whole: Group
    groups: tuple[Group, ...]
    replicas: tuple[Group, ...]
    sessions: tuple[One, ...]
    outliers: tuple[Outlier, ...]
    routing: Routing
    failed: tuple[Failed, ...]
    doubles: tuple[Double, ...]


@dataclass
class _Sum:
    counts: Counts = field(default_factory=Counts)
    replicas: set[tuple[str, str]] = field(default_factory=set)
    deployments: set[str | None] = field(default_factory=set)
    models: set[str | None] = field(default_factory=set)

    def add(self, partial: Partial) -> None:
        origin = partial.origin
        self.counts += partial.counts
        self.replicas.add(_replica(origin))
        self.deployments.add(origin.deployment)
        self.models.add(origin.model)

    def group(self, name: str, gpu_hour: float | None) -> Group:
        return Group(
            name=name,
            deployment=_only(self.deployments),
            model=_only(self.models),
            replicas=len(self.replicas),
            counts=self.counts,
            figures=figures.of_counts(self.counts),
            bill=None if gpu_hour is None else money.bill(self.counts, gpu_hour),
        )


class Merging:
    """Adds partials up. What it keeps of a session is a row.

    ``by``: one of ``KEYS``. ``gpu_hour``: the price of an hour of a GPU; None for no bill.
    """

    def __init__(self, by: str, gpu_hour: float | None) -> None:
        self._by = by
        self._gpu_hour = gpu_hour
        self._whole = _Sum()
        self._groups: dict[str, _Sum] = {}
        self._replicas: dict[tuple[str, str], _Sum] = {}
        self._sessions: dict[str, One] = {}
        self._paths: dict[tuple[str, str | None, str | None], str] = {}
        self._failed: list[Failed] = []
        self._doubles: list[Double] = []

    def add(self, partial: Partial) -> bool:
        """Add a session's partial; False where the fleet has that session already."""
        origin = partial.origin
        name = (origin.session_id, origin.started_at, origin.host)
        if name in self._paths:
            self._doubles.append(Double(origin.path, self._paths[name]))
            return False
        self._paths[name] = origin.path
        key = KEYS[self._by](origin) or UNKNOWN
        self._whole.add(partial)
        self._groups.setdefault(key, _Sum()).add(partial)
        self._replicas.setdefault(_replica(origin), _Sum()).add(partial)
        self._sessions[origin.path] = One(
            origin, partial.counts.ended, figures.of_counts(partial.counts), partial.warnings
        )
        return True

    def fail(self, failed: Failed) -> None:
        """A session could not be read."""
        self._failed.append(failed)

    def result(self, routing: Routing) -> Fleet:
        """What all of it comes to."""
        price = self._gpu_hour
        return Fleet(
            by=self._by,
            whole=self._whole.group("fleet", price),
            groups=tuple(self._groups[name].group(name, price) for name in sorted(self._groups)),
            replicas=tuple(
                self._replicas[key].group(key[1], price) for key in sorted(self._replicas)
            ),
            sessions=tuple(self._sessions[path] for path in sorted(self._sessions)),
            outliers=outliers.find(self._compared()),
            routing=routing,
            failed=tuple(sorted(self._failed, key=lambda one: (one.path, one.reason))),
            doubles=tuple(sorted(self._doubles, key=lambda one: one.path)),
        )

    def _compared(self) -> list[Replica]:
        sessions: dict[tuple[str, str], dict[str, Figures]] = {}
        for path, one in self._sessions.items():
            sessions.setdefault(_replica(one.origin), {})[path] = one.figures
        return [
            Replica(
                name=key[1],
                deployment=_only(found.deployments),
                model=_only(found.models),
                figures=figures.of_counts(found.counts),
                sessions=sessions[key],
            )
            for key, found in self._replicas.items()
        ]


def _replica(origin: Origin) -> tuple[str, str]:
    """A replica's name is only unique in its deployment."""
    return origin.deployment or "", origin.replica


def _only(values: set[str | None]) -> str | None:
    return next(iter(values)) if len(values) == 1 else None
