# SPDX-License-Identifier: Apache-2.0
"""Which part of the session does a moment belong to?

A chart has the same number of points however long the session is: its time is cut into equal bins,
and all that happened in a bin becomes one point.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from analysis.tables.session import Session

MOST = 360
"""Points of a time series at most: a screen shows no more in the width of a chart."""

FEWEST = 60
"""Points of a time series at least. In between, a point is a tenth of a second: an engine's steps
take some hundredths, and a bin without a step shows nothing."""

_STEPS_SEC = 0.1
_SHORTEST_SEC = 1e-6
"""The width of bins where no time passed: the precision of the tables."""


@dataclass(frozen=True)
class Bins:
    """The time from ``begin_sec`` on, in ``count`` parts of ``width_sec`` each."""

    begin_sec: float
    width_sec: float
    count: int

    @property
    def end_sec(self) -> float:
        """Where the last bin ends."""
        return self.begin_sec + self.count * self.width_sec

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Where the bins begin, and where the last one ends."""
        return tuple(self.begin_sec + index * self.width_sec for index in range(self.count + 1))

    @cached_property
    def middles(self) -> tuple[float, ...]:
        """The middle of each bin, in seconds since the session began."""
        return tuple(begin + self.width_sec / 2 for begin in self.edges[:-1])

    def of(self, time: pl.Expr) -> pl.Expr:
        """The number of the bin of a time in seconds, from 0 on, as ``bin``.

        Times outside belong to the nearest bin.
        """
        index = ((time - self.begin_sec) / self.width_sec).floor()
        return index.clip(0, self.count - 1).cast(pl.Int32).alias("bin")

    def finer(self, parts: int) -> Bins:
        """The same time in ``parts`` times as many bins."""
        return Bins(self.begin_sec, self.width_sec / parts, self.count * parts)

    def dense(self, frame: pl.DataFrame) -> pl.DataFrame:
        """A row for each ``bin`` in order; other columns are null where ``frame`` has no row."""
        every = pl.DataFrame({"bin": range(self.count)}, schema={"bin": pl.Int32})
        return every.join(frame, on="bin", how="left", maintain_order="left")


def of_session(session: Session, count: int | None = None) -> Bins:
    """The bins of the session's time, without its warm-up."""
    duration = session.end_sec - session.begin_sec
    if count is None:
        count = min(MOST, max(FEWEST, round(duration / _STEPS_SEC)))
    return Bins(session.begin_sec, max(duration / count, _SHORTEST_SEC), count)
