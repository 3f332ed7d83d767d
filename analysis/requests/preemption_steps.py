# SPDX-License-Identifier: Apache-2.0
"""Which steps preempted requests, and how many steps, tokens and preemptions were there?"""

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
    """Counts the steps from ``begin_sec`` on, and keeps those that preempted, warm-up included.

    ``preempted``: how often a step preempted a request. ``steps``: how many steps there were.
    ``scheduled_tokens``: tokens in all of them.
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
        """The steps that preempted, those in the warm-up included, in the table's order.

        Columns, as in the table: ``timestamp_sec``, ``engine``, ``step``, ``running_reqs``,
        ``scheduled_tokens``, ``preempted_reqs``.
        """
        kinds = {name: pl.Float64 if name == "timestamp_sec" else pl.Int64 for name in _KEPT}
        return pl.concat([pl.DataFrame(schema=kinds), *self.parts])


def read(session: Session) -> StepTally:
    """A tally that has seen all steps of the session.

    Raises:
        SessionError: the table cannot be read.

    """
    tally = StepTally(session.begin_sec)
    for batch in session.batches(TABLE, COLUMNS, history=True):
        tally.add(batch)
    return tally
