# SPDX-License-Identifier: Apache-2.0
"""How much of each GPU's memory was in use, and how busy was it, over time?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.gpu.memory import TABLE
from analysis.series.bins import Bins
from analysis.tables.session import Session

Values = tuple[float | None, ...]
"""One value a bin; None where nothing was sampled."""


@dataclass(frozen=True)
class GpuSeries:
    """One GPU, by NVML's index. ``used``: the most bytes in use of all samples in a bin. ``busy``:
    the mean share of the time in which any kernel ran, in percent."""

    gpu: int
    used: Values
    busy: Values


def measure(session: Session, bins: Bins) -> tuple[GpuSeries, ...]:
    """Every GPU that was sampled, by index.

    Raises:
        SessionError: the table cannot be read.

    """
    rows = session.collect(
        TABLE,
        lambda table: table.group_by("gpu", bins.of(pl.col("timestamp_sec"))).agg(
            used=pl.col("used_bytes").max(), busy=pl.col("utilization_pct").mean()
        ),
    )
    return tuple(
        _gpu(gpu, bins.dense(rows.filter(pl.col("gpu") == gpu)))
        for gpu in rows["gpu"].unique().sort()
    )


def _gpu(gpu: int, by_bin: pl.DataFrame) -> GpuSeries:
    return GpuSeries(gpu, tuple(by_bin["used"].to_list()), tuple(by_bin["busy"].to_list()))
