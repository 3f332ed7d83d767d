# SPDX-License-Identifier: Apache-2.0
"""Which steps preempted requests, and what do all steps come to?"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.tables.session import Session

TABLE = "scheduler_steps"

_KEPT = (
    "timestamp_sec",
    "engine",
    "step",
    "running_reqs",
    "scheduled_tokens",
    "preempted_reqs",
)
_SUMS = ("preempted_reqs", "repeats", "scheduled_tokens")
COLUMNS = (*_KEPT, "repeats")


@dataclass
class StepTally:
    """The steps seen so far, warm-up included, of which those from ``begin_sec`` on count.

    ``preempted``: how often a request was preempted; ``steps``: how many there were;
    ``scheduled_tokens`` in all of them.
    """

    begin_sec: float
    preempted: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    parts: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        counted = batch.filter(pl.col("timestamp_sec") >= self.begin_sec)
        preempted, steps, tokens = counted.select(pl.col(_SUMS).sum()).row(0)
        self.preempted += preempted
        self.steps += steps
        self.scheduled_tokens += tokens
        self.parts.append(batch.filter(pl.col("preempted_reqs") > 0).select(_KEPT))

    def preempting(self) -> pl.DataFrame:
        """The steps that preempted, warm-up's included, in the table's order: ``timestamp_sec``,
        ``engine``, ``step``, ``running_reqs``, ``scheduled_tokens``, ``preempted_reqs``."""
        kinds = {name: pl.Float64 if name == "timestamp_sec" else pl.Int64 for name in _KEPT}
        return pl.concat([pl.DataFrame(schema=kinds), *self.parts])


def read(session: Session) -> StepTally:
    """All steps of the session.

    Raises:
        SessionError: the table cannot be read.

    """
    found = StepTally(session.begin_sec)
    for batch in session.batches(TABLE, COLUMNS, history=True):
        found.add(batch)
    return found
