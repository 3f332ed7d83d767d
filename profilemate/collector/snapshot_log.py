# SPDX-License-Identifier: Apache-2.0
"""Which snapshots were taken of a session by itself, and how many were not: ``snapshots`` of its
metadata.json, from which a collector that is started again goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from profilemate.format.folder import Folder
from profilemate.format.session import METADATA_FILE

BY_SIGNAL = "SIGUSR2"
"""The reason of a snapshot that somebody asked the collector for."""

MOST_BY_SIGNAL = 100
"""So many of them are listed, the newest ones."""


@dataclass(frozen=True)
class Taken:
    """A snapshot: its folder's name, why it was taken, and where it ends, in seconds of the
    session."""

    name: str
    reason: str
    at_sec: float


@dataclass
class SnapshotLog:
    """``left_out``: because of the limit. ``problem``: why the last one that failed did; None where
    none has. ``when``: the conditions that are looked for."""

    taken: list[Taken] = field(default_factory=list)
    left_out: int = 0
    failed: int = 0
    problem: str | None = None
    when: str | None = None

    @classmethod
    def of(cls, session: Folder) -> SnapshotLog:
        """What the session's metadata.json says; nothing where it says nothing sound."""
        try:
            said = json.loads(session.read(METADATA_FILE))["snapshots"]
            return cls(
                [
                    Taken(str(each["name"]), str(each["reason"]), float(each["at_sec"]))
                    for each in said["taken"]
                ],
                int(said["left_out"]),
                int(said["failed"]),
                said["problem"] and str(said["problem"]),
                said["when"] and str(said["when"]),
            )
        except (OSError, ValueError, LookupError, TypeError):
            return cls()

    @property
    def by_itself(self) -> list[Taken]:
        """Those that count towards the limit."""
        return [each for each in self.taken if each.reason != BY_SIGNAL]

    def add(self, taken: Taken) -> None:
        """This one was taken."""
        self.taken.append(taken)
        by_signal = [each for each in self.taken if each.reason == BY_SIGNAL]
        if len(by_signal) > MOST_BY_SIGNAL:
            self.taken.remove(by_signal[0])

    def fail(self, problem: str) -> None:
        """One could not be taken."""
        self.failed += 1
        self.problem = problem

    def content(self) -> dict[str, Any] | None:
        """As in metadata.json; None where nothing was asked for."""
        return asdict(self) if self != SnapshotLog() else None
