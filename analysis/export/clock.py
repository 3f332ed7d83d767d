# SPDX-License-Identifier: Apache-2.0
"""On which clock are the times of an export?"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.tables.metadata import wall_clock
from analysis.tables.session import Session


@dataclass(frozen=True)
class Clock:
    """``begin_ns``: second 0 of the session, in nanoseconds since 1970; 0 where it is not known."""

    begin_ns: int

    @classmethod
    def of(cls, session: Session) -> Clock:
        began = wall_clock(session.metadata.get("started_at"))
        return cls(round((began or 0) * 1e6) * 1000)

    def ns(self, sec: float) -> int:
        """A time of the session in nanoseconds since 1970. Tables have whole microseconds."""
        return self.begin_ns + round(sec * 1e6) * 1000
