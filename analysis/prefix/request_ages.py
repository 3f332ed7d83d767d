# SPDX-License-Identifier: Apache-2.0
"""How many requests came between a content's last use and its hit, or its eviction?

Time says little of a cache where the load comes and goes: nothing is evicted in a pause. So ages
are counted in requests, too: those that the engine admitted since the last use, the one that hits
included. An age in seconds and one in requests are of the same blocks (``analysis.prefix.ages``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.pool.lifetimes import FOR_ROOM
from analysis.prefix.prompts import ENGINES, Prompts
from analysis.stats.quantiles import of_time

Ints = NDArray[np.int64]
Clocks = Mapping[int, NDArray[np.float64]]
"""By engine, when it admitted requests, each once, in order."""

COLUMNS = ("timestamp_sec", "idle_sec", "reason", "engine")
"""Of kv_cache_evictions.csv."""


@dataclass(frozen=True)
class AgeBin:
    """``count`` blocks with an age of ``least`` to ``most`` requests."""

    least: int
    most: int
    count: int


@dataclass(frozen=True)
class RequestAges:
    """Ages in requests of ``count`` blocks. A quantile is the smallest age that at least that share
    of the blocks did not exceed; None without a block, as ``most``. ``bins``: 0, 1, 2 to 3, 4 to 7
    and so on, from the first to the last that has any."""

    count: int
    p50: int | None
    p95: int | None
    most: int | None
    bins: tuple[AgeBin, ...]


class _Counts:
    """How many blocks had each age."""

    def __init__(self) -> None:
        self._blocks = np.zeros(1, np.int64)

    def add(self, ages: Ints, blocks: Ints) -> None:
        if len(ages) and ages.max() >= len(self._blocks):
            more = np.zeros(2 * int(ages.max()) + 1, np.int64)
            more[: len(self._blocks)] = self._blocks
            self._blocks = more
        np.add.at(self._blocks, ages, blocks)

    def result(self) -> RequestAges:
        known = np.flatnonzero(self._blocks)
        if not len(known):
            return RequestAges(0, None, None, None, ())
        pairs = [(int(age), int(self._blocks[age])) for age in known]
        p50, p95 = (int(of_time(pairs, percent) or 0) for percent in (50, 95))
        most = int(known[-1])
        return RequestAges(int(self._blocks.sum()), p50, p95, most, tuple(self._bins(pairs)))

    def _bins(self, pairs: list[tuple[int, int]]) -> list[AgeBin]:
        counts: dict[int, int] = {}
        for age, blocks in pairs:
            # Ages of as many binary digits are one bin.
            counts[age.bit_length()] = counts.get(age.bit_length(), 0) + blocks
        return [
            AgeBin((1 << digits) >> 1, max((1 << digits) - 1, 0), counts.get(digits, 0))
            for digits in range(min(counts), max(counts) + 1)
        ]


def clocks(prompts: Prompts) -> Clocks:
    """When each engine admitted requests, the warm-up included."""
    parts = (
        prompts.asked.select("engine", "timestamp_sec")
        .drop_nulls()
        .partition_by("engine", as_dict=True, include_key=False)
    )
    return {int(key[0]): np.sort(part["timestamp_sec"].to_numpy()) for key, part in parts.items()}


def at_hit(uses: pl.DataFrame, admitted: Clocks) -> RequestAges:
    """The ages of blocks that a lookup found.

    Args:
        uses: what ``analysis.prefix.reuse.uses`` returns.
        admitted: what ``clocks`` returns.

    """
    found = uses.filter("asked", "found", pl.col("previous_sec").is_not_null()).with_columns(
        engine=pl.col("key") % ENGINES
    )
    tally = _Counts()
    for (engine,), rows in found.group_by("engine"):
        begin, previous = (rows[at].to_numpy() for at in ("begin_sec", "previous_sec"))
        tally.add(_between(admitted, int(engine), previous, begin), rows["blocks"].to_numpy())
    return tally.result()


@dataclass
class EvictionAgeTally:
    """Counts the ages of blocks that were evicted because their room was needed."""

    admitted: Clocks
    counts: _Counts = field(default_factory=_Counts)

    def add(self, batch: pl.DataFrame) -> None:
        for_room = pl.col("reason").fill_null(FOR_ROOM) == FOR_ROOM
        known = batch.filter(for_room).select("engine", "timestamp_sec", "idle_sec").drop_nulls()
        for (engine,), rows in known.group_by("engine"):
            at = rows["timestamp_sec"].to_numpy()
            ages = _between(self.admitted, int(engine), at - rows["idle_sec"].to_numpy(), at)
            self.counts.add(ages, np.ones(len(ages), np.int64))

    def result(self) -> RequestAges:
        return self.counts.result()


def _between(
    admitted: Clocks, engine: int, begin: NDArray[np.float64], end: NDArray[np.float64]
) -> Ints:
    """How many requests the engine admitted after each begin, up to the end."""
    times = admitted.get(engine, np.empty(0))
    ages: Ints = np.searchsorted(times, end, side="right") - np.searchsorted(
        times, begin, side="right"
    )
    return np.maximum(ages, 0)
