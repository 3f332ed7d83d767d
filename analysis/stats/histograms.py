# SPDX-License-Identifier: Apache-2.0
"""How are times spread that range from milliseconds to days?

Every histogram has the same bounds, so that any two can be laid over each other: 1, 2 and 5 times
the powers of ten from 1 ms to 500,000 s. A bin includes its lower bound. One more bin lies below
the first bound, and one begins at the last bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import polars as pl

BOUNDS_SEC = tuple(float(f"{digit}e{power}") for power in range(-3, 6) for digit in (1, 2, 5))


@dataclass(frozen=True)
class Bin:
    """``count`` values from ``from_sec`` on and below ``to_sec``, which is None in the last bin."""

    from_sec: float
    to_sec: float | None
    count: int


def of_sorted(values: pl.Series) -> tuple[Bin, ...]:
    """The bins of these sorted values in seconds, from the first to the last that has any."""
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
