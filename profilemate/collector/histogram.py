# SPDX-License-Identifier: Apache-2.0
"""A histogram with fixed bounds, and the exact sum of what is in it."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from profilemate.format import totals


class Histogram:
    """``counts[n]`` values lie below ``bounds[n]`` and not below the bound before."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0

    def add(self, value: int, count: int = 1) -> None:
        """The value came so many times."""
        self.counts[bisect_right(self.bounds, value)] += count
        self.sum += value * count

    def content(self) -> totals.Histogram:
        """As in ``totals.json``."""
        return {
            "bounds": list(self.bounds),
            "counts": list(self.counts),
            "count": sum(self.counts),
            "sum": self.sum,
        }

    def state(self) -> Any:
        """What ``restore`` takes; JSON keeps it exactly."""
        return [list(self.counts), self.sum]

    def restore(self, state: Any) -> None:
        """Go on where another one of these bounds was."""
        counts, self.sum = state
        self.counts = list(counts)
