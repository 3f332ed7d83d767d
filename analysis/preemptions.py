# SPDX-License-Identifier: Apache-2.0
"""How often was a running request thrown out to make room?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.requests import Requests
from analysis.session import Session

TABLE = "scheduler_steps"


@dataclass(frozen=True)
class Preemptions:
    """``count``: preemptions in all steps. ``requests``: ended requests that were preempted at
    least once, of ``ended_requests``; ``most_of_one`` is how often one of them was. Requests that
    have not ended have no row to count them by.
    """

    count: int
    steps: int
    requests: int
    ended_requests: int
    most_of_one: int


def measure(session: Session, requests: Requests) -> Preemptions:
    """Preemptions over all engines of the session.

    Raises:
        SessionError: the table cannot be read.

    """
    by_engine = session.collect(
        TABLE,
        lambda table: table.group_by("engine").agg(
            pl.col("preempted_reqs", "repeats").sum(),
        ),
    )
    return Preemptions(
        count=int(by_engine["preempted_reqs"].sum()),
        steps=int(by_engine["repeats"].sum()),
        requests=requests.preempted,
        ended_requests=requests.ended,
        most_of_one=requests.most_preemptions,
    )
