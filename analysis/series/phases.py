# SPDX-License-Identifier: Apache-2.0
"""How large were the steps of each phase over time, and how long did they take on the GPU?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from analysis.gpu import gpu_time
from analysis.requests.scheduling import STEPS
from analysis.series.bins import Bins
from analysis.tables.phases import PHASE, PHASES
from analysis.tables.session import Session

ByPhase = Mapping[str, tuple[float | None, ...]]
"""By phase a value for each bin, None where it had no step. Phases without any step are missing."""


@dataclass(frozen=True)
class PhaseSeries:
    """``tokens``: scheduled in a step, on average over the steps of the bin, of all engines.
    ``gpu_ms``: milliseconds of a step on the GPU, on average over those that were timed, of all
    workers. ``encoder_ms``: the same of the encoder, where a step gave it something; empty where
    none did."""

    tokens: ByPhase
    gpu_ms: ByPhase
    encoder_ms: tuple[float | None, ...]


def measure(session: Session, bins: Bins) -> PhaseSeries:
    """The steps of all engines and workers.

    Raises:
        SessionError: a table cannot be read.

    """
    at = bins.of(pl.col("timestamp_sec"))
    scheduled = session.collect(
        STEPS,
        lambda table: (
            table.filter(pl.col("scheduled_tokens") > 0)
            .group_by(at, phase=PHASE)
            .agg(value=pl.col("scheduled_tokens").mean())
        ),
    )
    timed = session.collect(
        gpu_time.TABLE,
        lambda table: (
            table.filter(pl.col("gpu_us").is_not_null())
            .group_by(at, phase=PHASE)
            .agg(value=pl.col("gpu_us").mean() / 1e3)
        ),
    )
    encoded = session.collect(
        gpu_time.TABLE,
        lambda table: (
            table.filter((pl.col("encoder_items") > 0) & pl.col("encoder_us").is_not_null())
            .group_by(at)
            .agg(value=pl.col("encoder_us").mean() / 1e3)
        ),
    )
    return PhaseSeries(
        tokens=_by_phase(bins, scheduled),
        gpu_ms=_by_phase(bins, timed),
        encoder_ms=() if encoded.is_empty() else _values(bins, encoded),
    )


def _by_phase(bins: Bins, rows: pl.DataFrame) -> ByPhase:
    found = {phase: part for (phase,), part in rows.partition_by("phase", as_dict=True).items()}
    return {phase: _values(bins, found[phase].drop("phase")) for phase in PHASES if phase in found}


def _values(bins: Bins, rows: pl.DataFrame) -> tuple[float | None, ...]:
    return tuple(bins.dense(rows)["value"].to_list())
