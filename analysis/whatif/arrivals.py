# SPDX-License-Identifier: Apache-2.0
"""When did the requests arrive, as far as a session shows it?

An engine takes requests over between two steps, and only then is their arrival recorded. If a
request arrives during a step, only the step is known: its middle counts as the arrival. If a
request arrives at an idle engine, the recorded time is right, for it and for those that were taken
over together with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analysis.tables.schema import TABLES
from analysis.tables.session import Session
from analysis.whatif.clock import StepTime
from analysis.whatif.drops import HALF_TICK_SEC
from analysis.whatif.ids import Ints
from analysis.whatif.workload import Floats, Workload

TABLE = TABLES["scheduler_steps"]

LATE = 1.5
"""A request came to an idle engine if the engine had nothing else left, and took it over after this
many times the expected time of its last step."""

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
    """The same requests, with the arrivals that the session's steps suggest, in order of these.

    Args:
        session: the one that the requests are of.
        workload: its requests.
        step_time: how long its steps take.

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
    arrivals, dropped = workload.arrival_sec.copy(), workload.drops.at_sec.copy()
    for rank in workload.engines:
        chosen = np.flatnonzero(workload.engine == rank)
        arrivals[chosen] = _estimated(arrivals[chosen], steps[steps[:, 4] == rank])
        own = workload.drops.engine == rank
        busy, idle = own & ~workload.drops.at_rest, own & workload.drops.at_rest
        dropped[busy] = _middles(dropped[busy], steps[steps[:, 4] == rank, 0])
        dropped[idle] = _before_what_follows(
            dropped[idle], arrivals[chosen], workload.admitted_sec[chosen]
        )
    found = replace(workload, arrival_sec=arrivals, drops=replace(workload.drops, at_sec=dropped))
    return found.take(np.argsort(arrivals, kind="stable"))


def _before_what_follows(seen: Floats, arrivals: Floats, admitted: Floats) -> Floats:
    """No later than the arrivals of all requests that were admitted after these moments: they may
    have come before, and waited."""
    known = np.isfinite(admitted)
    order = np.argsort(admitted[known], kind="stable")
    # From the end: the first arrival of this request, or of one that was admitted later.
    first = np.minimum.accumulate(arrivals[known][order][::-1])[::-1]
    after = np.searchsorted(admitted[known][order], seen - HALF_TICK_SEC)
    return np.asarray(np.minimum(seen, np.append(first, np.inf)[after]), np.float64)


def _middles(seen: Floats, when: Floats) -> Floats:
    """Between these moments and the steps before them, as the arrivals during a step are: so what
    was dropped during a step keeps its place among them."""
    before = np.searchsorted(when, seen - HALF_TICK_SEC) - 1
    if not len(when):
        return seen
    return np.where(before >= 0, (when[np.maximum(before, 0)] + seen) / 2, seen)


def _estimated(seen: Floats, steps: Floats) -> Floats:
    """The arrivals of one engine's requests, which were ``seen`` in this order."""
    when, takes, left = steps[:, 0], steps[:, 1], steps[:, 2]
    ended_next = np.append(steps[1:, 3], 0)
    # The step that took it over may have the same microsecond: times are rounded.
    before: Ints = np.searchsorted(when, seen - HALF_TICK_SEC) - 1
    known = before >= 0
    step = np.maximum(before, 0)
    if not len(steps):
        return seen
    first = seen[np.searchsorted(before, before)]
    is_late = first - when[step] > LATE * takes[step]
    is_idle = ~known | (is_late & (left[step] <= ended_next[step]))
    return np.where(is_idle, first, (when[step] + seen) / 2)
