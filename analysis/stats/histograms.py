# SPDX-License-Identifier: Apache-2.0
"""How are times spread that range from milliseconds to days?

The bounds are 1, 2 and 5 times the powers of ten from 1 ms to 500,000 s, the same in every
histogram, so that any two can be laid over each other. A bin includes its lower bound. Below the
first bound and from the last one on there is one bin each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import polars as pl

BOUNDS_SEC = tuple(float(f"{digit}e{power}") for power in range(-3, 6) for digit in (1, 2, 5))


@dataclass(frozen=True)
class Bin:
    """``count`` values from ``from_sec`` on and below ``to_sec``, which the last bin has not."""

    from_sec: float
    to_sec: float | None
    count: int


def of_sorted(values: pl.Series) -> tuple[Bin, ...]:
    """The bins from the first to the last that has any of these sorted values."""
    below = [0, *values.search_sorted(pl.Series(BOUNDS_SEC), side="left").to_list(), len(values)]
    counts = [end - begin for begin, end in pairwise(below)]
    filled = [number for number, count in enumerate(counts) if count]
    if not filled:
        return ()
    lows, highs = (0.0, *BOUNDS_SEC), (*BOUNDS_SEC, None)
    return tuple(
        Bin(lows[number], highs[number], counts[number])
        for number in range(filled[0], filled[-1] + 1)
    )
