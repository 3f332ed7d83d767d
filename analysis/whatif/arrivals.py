# SPDX-License-Identifier: Apache-2.0
"""When did the requests arrive, as far as a session tells?

An engine takes requests over between two steps, and that is when their arrival is recorded: one
that arrives while a step runs is seen when it has ended. So of such a request only the step is
known in which it came, and the middle of it is taken. One that came to an idle engine came when it
was seen, and so did those that were taken over together with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analysis.tables.schema import TABLES
from analysis.tables.session import Session
from analysis.whatif.clock import StepTime
from analysis.whatif.ids import Ints
from analysis.whatif.workload import Floats, Workload

TABLE = TABLES["scheduler_steps"]

LATE = 1.5
"""A request that is seen later than this many times the step's expected time, by an engine that
had nothing else left, came to an idle engine."""

HALF_TICK_SEC = 0.5e-6

_COLUMNS = (
    "timestamp_sec",
    "running_reqs",
    "waiting_reqs",
    "prefill_tokens",
    "decode_tokens",
    "scheduled_reqs",
    "finished_reqs",
    "engine",
)


def estimated(session: Session, workload: Workload, step_time: StepTime) -> Workload:
    """The workload of this session with the arrivals that its steps suggest.

    Raises:
        SessionError: the table of steps cannot be read.

    """
    parts: list[Floats] = [np.empty((0, 5))]
    for batch in session.batches(TABLE.name, _COLUMNS, history=True):
        when, running, waiting, prefill, decode, reqs, finished, engine = (
            column.fill_null(0).to_numpy() for column in batch.select(_COLUMNS)
        )
        takes = step_time.seconds(prefill, decode, reqs)
        parts.append(np.column_stack([when, takes, running + waiting, finished, engine]))
    steps = np.concatenate(parts)
    arrivals = workload.arrival_sec.copy()
    for rank in workload.engines:
        chosen = np.flatnonzero(workload.engine == rank)
        arrivals[chosen] = _estimated(arrivals[chosen], steps[steps[:, 4] == rank])
    found = replace(workload, arrival_sec=arrivals)
    return found.take(np.argsort(arrivals, kind="stable"))


def _estimated(seen: Floats, steps: Floats) -> Floats:
    """Of requests of one engine, in the order in which they were seen."""
    when, takes, left = steps[:, 0], steps[:, 1], steps[:, 2]
    ended_next = np.append(steps[1:, 3], 0)
    # The step that took it over may be of the same microsecond, which is what times are told to.
    before: Ints = np.searchsorted(when, seen - HALF_TICK_SEC) - 1
    known = before >= 0
    step = np.maximum(before, 0)
    if not len(steps):
        return seen
    first = seen[np.searchsorted(before, before)]
    is_late = first - when[step] > LATE * takes[step]
    is_idle = ~known | (is_late & (left[step] <= ended_next[step]))
    return np.where(is_idle, first, (when[step] + seen) / 2)
