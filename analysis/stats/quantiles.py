# SPDX-License-Identifier: Apache-2.0
"""The two kinds of quantile that the analyzer reports, and their exact definitions.

A sample (lifetimes, idle times) is interpolated: its quantile lies between the two nearest of the
n sorted values, at position ``q * (n - 1)`` counted from 0. This is type 7 of Hyndman and Fan,
"Sample Quantiles in Statistical Packages" (1996), and the default of pandas and NumPy.

A quantity that holds for a time (usage) is not interpolated: its quantile is the smallest value
that it did not exceed for at least the share ``q`` of the time. This is type 1 of the same paper,
the inverse of the distribution function, with seconds in place of counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl


def of_sample(ordered: pl.Series, percent: int) -> float | None:
    """The quantile of sorted values; None where there is none."""
    return ordered.quantile(percent / 100, interpolation="linear")


def of_time(levels: Iterable[tuple[float, int]], percent: int) -> float | None:
    """The quantile of (value, duration) pairs in any order; None where no time passed.

    Durations are whole numbers, such as microseconds, so that a share can be met exactly.
    """
    ordered = sorted(levels)
    total = sum(duration for _, duration in ordered)
    reached = 0
    for value, duration in ordered:
        reached += duration
        if duration and reached * 100 >= percent * total:
            return value
    return None
