# SPDX-License-Identifier: Apache-2.0
"""How are times spread of which only the bins are kept?

Such histograms are those of ``totals.json``. Those of several sessions merge without a loss: each
bin has the sum of the counts. A quantile of them is only known to lie in one of the bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from profilemate.format.totals import TIMES_NS

BINS = len(TIMES_NS) + 1


@dataclass(frozen=True)
class Quantile:
    """A quantile in seconds that lies from ``low_sec`` on and below ``high_sec``, which is None in
    the last bin. ``sec``: the estimate, with the values of a bin spread evenly over it."""

    sec: float
    low_sec: float
    high_sec: float | None


@dataclass(frozen=True)
class Binned:
    """Durations by bin, as in ``analysis.stats.histograms``. ``counts``: the first ones lie below
    the first bound, the last ones at or beyond the last. ``sum_ns``: of all, in nanoseconds."""

    counts: tuple[int, ...] = (0,) * BINS
    sum_ns: int = 0

    def __add__(self, other: Binned) -> Binned:
        return Binned(tuple(map(add, self.counts, other.counts)), self.sum_ns + other.sum_ns)

    @property
    def count(self) -> int:
        """How many durations there are."""
        return sum(self.counts)

    @property
    def mean_sec(self) -> float | None:
        """Exact, as the sum is; None where there is no duration."""
        return self.sum_ns / 1e9 / self.count if self.count else None

    def quantile(self, percent: int) -> Quantile | None:
        """The smallest duration that at least so many percent do not exceed; None of none."""
        # The place among the sorted durations, counted from 1, without a rounding error.
        place = max(1, -(-percent * self.count // 100))
        before = 0
        for number, count in enumerate(self.counts):
            if before < place <= before + count:
                return _within(number, (place - before) / count)
            before += count
        return None


def of_counts(bounds: Sequence[int], counts: Sequence[int], sum_ns: int) -> Binned | None:
    """The histogram with these bounds in nanoseconds; None where they are not the analyzer's."""
    return Binned(tuple(counts), sum_ns) if tuple(bounds) == TIMES_NS else None


def _within(number: int, share: float) -> Quantile:
    low = TIMES_NS[number - 1] / 1e9 if number else 0.0
    if number == len(TIMES_NS):
        return Quantile(low, low, None)
    high = TIMES_NS[number] / 1e9
    return Quantile(low + share * (high - low), low, high)
