# SPDX-License-Identifier: Apache-2.0
"""How often was a running request thrown out to make room?

Which requests that were, as far as they have ended, is in ``analysis.requests``.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.session import Session

TABLE = "scheduler_steps"


@dataclass(frozen=True)
class Preemptions:
    """``count``: preemptions in all ``steps`` of the scheduler, idle ones included."""

    count: int
    steps: int


def measure(session: Session) -> Preemptions:
    """Preemptions over all engines of the session.

    Raises:
        SessionError: the table cannot be read.

    """
    by_engine = session.collect(
        TABLE,
        lambda table: table.group_by("engine").agg(pl.col("preempted_reqs", "repeats").sum()),
    )
    return Preemptions(
        count=int(by_engine["preempted_reqs"].sum()), steps=int(by_engine["repeats"].sum())
    )
