# SPDX-License-Identifier: Apache-2.0
"""How are the values of a sample spread?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.stats.histograms import Bin, of_sorted
from analysis.stats.quantiles import of_sample


@dataclass(frozen=True)
class Spread:
    """A sample in seconds. Every figure but ``count`` is None where the sample is empty.

    The quantiles are those of ``analysis.stats.quantiles.of_sample``, and ``bins`` those of
    ``analysis.stats.histograms``.
    """

    count: int
    mean_sec: float | None
    p50_sec: float | None
    p90_sec: float | None
    p95_sec: float | None
    p99_sec: float | None
    max_sec: float | None
    bins: tuple[Bin, ...]


def spread(values: pl.Series) -> Spread:
    """The spread of these values in seconds, none of them null. It may leave them sorted."""
    values = values.sort(in_place=True)
    if values.is_empty():
        return Spread(0, None, None, None, None, None, None, ())
    mean = float(values.mean())  # type: ignore[arg-type]
    p50, p90, p95, p99 = (of_sample(values, percent) for percent in (50, 90, 95, 99))
    return Spread(len(values), mean, p50, p90, p95, p99, values[-1], of_sorted(values))
