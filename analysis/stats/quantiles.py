# SPDX-License-Identifier: Apache-2.0
"""The two kinds of quantile that the analyzer reports, and their exact definitions.

Of a sample (lifetimes, idle times): linear interpolation between the two nearest of the sorted
values, at position ``q * (n - 1)`` counted from 0. That is type 7 of Hyndman and Fan, "Sample
Quantiles in Statistical Packages" (1996), and what pandas and NumPy do unless told otherwise.

Of a quantity that holds for a time (usage): the smallest value such that the quantity was at or
below it for at least the share ``q`` of the time. That is type 1 of the same paper, the inverse
of the distribution function, with seconds in place of counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl


def of_sample(ordered: pl.Series, percent: int) -> float | None:
    """The quantile of values that are sorted already; None of none."""
    return ordered.quantile(percent / 100, interpolation="linear")


def of_time(levels: Iterable[tuple[float, int]], percent: int) -> float | None:
    """The quantile of (value, duration) pairs in any order; None where no time passed.

    Durations are whole numbers (microseconds), so a share that is met exactly counts as met.
    """
    ordered = sorted(levels)
    total = sum(duration for _, duration in ordered)
    reached = 0
    for value, duration in ordered:
        reached += duration
        if duration and reached * 100 >= percent * total:
            return value
    return None
