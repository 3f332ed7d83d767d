# SPDX-License-Identifier: Apache-2.0
"""How long does a step take, by what it computes?

The time of a step is the time from its ``schedule()`` to that of the next step, if the engine had
requests to go on with; otherwise it waited for the next request. With several batches in flight
(asynchronous scheduling, pipeline parallelism) the time from one step to the next is that of the
batch that leaves: it belongs to a step that was scheduled as many steps before.

The model is a sum that never falls as a step computes more: a constant, and a time for each
prefill token, each decode token and each request. None of these is negative, and their squared
error is the least (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23). The cost
of attention over long contexts is not part of it, since the steps do not have their contexts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import polars as pl

from analysis.tables.schema import TABLES
from analysis.tables.session import Session
from analysis.whatif.clock import StepTime
from analysis.whatif.workload import Floats

TABLE = TABLES["scheduler_steps"]

_COLUMNS = (
    "timestamp_sec",
    "running_reqs",
    "waiting_reqs",
    "prefill_tokens",
    "decode_tokens",
    "scheduled_tokens",
    "scheduled_reqs",
    "finished_reqs",
    "repeats",
    "engine",
)
_DIGITS = 12
"""Less than a picosecond is an error of the arithmetic."""

_TERMS = ("prefill_tokens", "decode_tokens", "scheduled_reqs")


def fit(session: Session, *, batches: int = 1) -> StepTime | None:
    """The step time of all engines of the session together; None where it has too few steps.

    Args:
        session: the session.
        batches: how many are in flight at once.

    Raises:
        SessionError: the table cannot be read.

    """
    normal, steps = np.zeros((5, 5)), 0
    for rows in _timed(session, batches):
        values = rows.select(pl.lit(1.0), *_TERMS, "seconds").to_numpy().astype(np.float64)
        normal += values.T @ values
        steps += rows.height
    if steps < 2:
        return None
    terms = _non_negative(normal[:4, :4], normal[:4, 4])
    squares = normal[4, 4] - 2 * terms @ normal[:4, 4] + terms @ normal[:4, :4] @ terms
    constant, prefill, decode, request = (round(float(term), _DIGITS) for term in terms)
    return StepTime(
        constant_sec=constant,
        prefill_token_sec=prefill,
        decode_token_sec=decode,
        request_sec=request,
        steps=steps,
        mean_sec=float(normal[0, 4] / steps),
        rms_error_sec=float(np.sqrt(max(squares, 0.0) / steps)),
    )


def _timed(session: Session, batches: int) -> Iterator[pl.DataFrame]:
    """Steps that the engine went on after, and how long they took (``seconds``)."""
    left: pl.DataFrame | None = None
    for batch in session.batches(TABLE.name, _COLUMNS):
        rows = batch if left is None else pl.concat([left, batch])
        # The next step shows how long this one took, and may be in the next batch of rows.
        left = rows.group_by("engine", maintain_order=True).tail(batches).select(_COLUMNS)
        unfinished = pl.col("running_reqs") + pl.col("waiting_reqs")
        timed = rows.with_columns(
            goes_on=unfinished > pl.col("finished_reqs").shift(-1).over("engine"),
            seconds=pl.col("timestamp_sec").diff().shift(-1).over("engine"),
        )
        if batches > 1:
            # The batch that left was scheduled as many steps before, if the engine never waited.
            timed = timed.with_columns(
                pl.col(*_TERMS, "scheduled_tokens", "repeats").shift(batches - 1).over("engine"),
                goes_on=pl.all_horizontal(
                    pl.col("goes_on").shift(lag).over("engine") for lag in range(batches)
                ),
            )
        yield timed.filter(
            "goes_on", pl.col("scheduled_tokens") > 0, pl.col("repeats") == 1
        ).drop_nulls("seconds")


def _non_negative(normal: Floats, right: Floats) -> Floats:
    """The solution with the least squared error and without a negative term.

    It equals the plain solution for the terms that are not 0 in it. So it is found by solving for
    every set of terms.
    """
    # Scaled, as tokens are many and each step has one constant.
    scale = np.sqrt(np.where(np.diag(normal) > 0, np.diag(normal), 1.0))
    normal, right = normal / np.outer(scale, scale), right / scale
    best: Floats = np.zeros(len(right))
    least = np.inf
    for count in range(len(right) + 1):
        for chosen in combinations(range(len(right)), count):
            at = list(chosen)
            terms = np.zeros(len(right))
            terms[at] = np.linalg.lstsq(normal[np.ix_(at, at)], right[at], rcond=1e-12)[0]
            error = float(terms @ normal @ terms - 2 * terms @ right)
            if (terms >= 0).all() and error < least:
                best, least = terms, error
    solution: Floats = best / scale
    return solution
