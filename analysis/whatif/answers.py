# SPDX-License-Identifier: Apache-2.0
"""How many steps did each answer take?

With speculation a step gives more than one token, and no table says how many. An answer's steps are
known: those that were scheduled from its first token to its end. Preempted requests waited in
between, so theirs are estimated by the mean of the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analysis.tables.schema import TABLES
from analysis.tables.session import Session
from analysis.whatif.drops import HALF_TICK_SEC
from analysis.whatif.ids import Ints

TABLE = TABLES["scheduler_steps"]

Floats = NDArray[np.float64]


def steps(
    session: Session,
    *,
    tokens: Ints,
    first_token_sec: Floats,
    finish_sec: Floats,
    engine: Ints,
    preempted: Ints,
) -> Floats:
    """The steps that each request's answer took after its first token; NaN where it has no more.

    Args:
        session: the session.
        tokens: of each answer.
        first_token_sec: when the first of them came; NaN where not known.
        finish_sec: when the request ended; NaN where not known.
        engine: its data-parallel rank.
        preempted: how often it was preempted.

    Raises:
        SessionError: the table of steps cannot be read.

    """
    parts: list[Floats] = [np.empty((0, 2))]
    columns = "timestamp_sec", "scheduled_tokens", "engine"
    for batch in session.batches(TABLE.name, columns, history=True):
        when, scheduled, rank = (batch[name].fill_null(0).to_numpy() for name in columns)
        parts.append(np.column_stack([when, rank])[scheduled > 0])
    known = np.concatenate(parts)
    more = np.maximum(tokens - 1, 0).astype(np.float64)
    taken = np.zeros(len(tokens))
    for rank in np.unique(engine).tolist():
        own = engine == rank
        when = known[known[:, 1] == rank, 0]
        begun, ended = (
            np.searchsorted(when, at[own] - HALF_TICK_SEC) for at in (first_token_sec, finish_sec)
        )
        taken[own] = ended - begun
    has_times = np.isfinite(first_token_sec) & np.isfinite(finish_sec)
    measured = has_times & (taken > 0) & (more > 0) & (preempted == 0)
    mean = more[measured].sum() / taken[measured].sum() if measured.any() else 1.0
    return np.where(more == 0, np.nan, np.where(measured, taken, more / max(mean, 1.0)))
