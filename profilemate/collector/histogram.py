# SPDX-License-Identifier: Apache-2.0
"""A histogram with fixed bounds, and the exact sum of what is in it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from operator import mul
from typing import Any

from profilemate.format import totals


class Histogram:
    """``counts[n]`` values lie below ``bounds[n]`` and not below the bound before."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0

    @property
    def count(self) -> int:
        """How many values came."""
        return sum(self.counts)

    def add(self, values: Sequence[int]) -> None:
        """These values came."""
        counts = self.counts
        for place, times in Counter(map(bisect_right, repeat(self.bounds), values)).items():
            counts[place] += times
        self.sum += sum(values)

    def add_times(self, values: Sequence[int], times: Sequence[int]) -> None:
        """Each of these values came so many times."""
        counts = self.counts
        places = map(bisect_right, repeat(self.bounds), values)
        for place, count in zip(places, times, strict=True):
            counts[place] += count
        self.sum += sum(map(mul, values, times))

    def content(self) -> totals.Histogram:
        """As in ``totals.json``."""
        return {
            "bounds": list(self.bounds),
            "counts": list(self.counts),
            "count": self.count,
            "sum": self.sum,
        }

    def saved(self) -> Any:
        """What ``restore`` takes; JSON keeps it exactly."""
        return [list(self.counts), self.sum]

    def restore(self, state: Any) -> None:
        """Go on where another one of these bounds was."""
        counts, self.sum = state
        self.counts = list(counts)
