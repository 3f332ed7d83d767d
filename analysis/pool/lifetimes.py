# SPDX-License-Identifier: Apache-2.0
"""How long did evicted blocks live, and how long had they been idle when they were evicted?"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.stats.spread import Spread, spread

_TIMES = ("lifetime_sec", "idle_sec", "evictable_sec")
COLUMNS = ("reason", *_TIMES)

FOR_ROOM = "reallocated"
"""The ``reason`` of evictions for room in kv_cache_evictions.csv."""


@dataclass(frozen=True)
class Lifetimes:
    """The times of every block that was evicted because its room was needed, in seconds.

    Resets and evictions on request say nothing about the room, and are left out.
    ``lifetime``: from its allocation to its eviction. ``idle``: from its last allocation or reuse
    to its eviction. ``evictable``: from the moment that its last holder let go of it; blocks that
    were evicted while a request held them have no such time.
    """

    lifetime: Spread
    idle: Spread
    evictable: Spread


@dataclass
class LifetimeTally:
    """Keeps all three times of every eviction for room: 12 bytes an eviction.

    Times that are not whole microseconds, or over an hour and eleven minutes, take 8 bytes each.
    """

    parts: dict[str, list[pl.Series]] = field(
        default_factory=lambda: {column: [] for column in _TIMES}
    )

    def add(self, batch: pl.DataFrame) -> None:
        # What is not known counts as evicted for room, the usual reason.
        is_for_room = batch["reason"].fill_null(FOR_ROOM) == FOR_ROOM
        if not is_for_room.all():
            batch = batch.filter(is_for_room)
        micros = batch.select((pl.col(_TIMES) * 1e6).round().cast(pl.UInt32, strict=False))
        for column, parts in self.parts.items():
            short, values = micros[column], batch[column]
            exact = _seconds(short).eq_missing(values).all()
            parts.append((short if exact else values).drop_nulls())

    def result(self) -> Lifetimes:
        return Lifetimes(*(self._spread(column) for column in _TIMES))

    def _spread(self, column: str) -> Spread:
        parts = self.parts.pop(column)
        whole = [part for part in parts if part.dtype == pl.UInt32]
        others = [part for part in parts if part.dtype != pl.UInt32]
        micros = pl.concat([pl.Series(column, [], pl.UInt32), *whole])
        parts.clear()
        whole.clear()
        micros = micros.sort(in_place=True)
        parts = [_seconds(micros.slice(at, _SLICE)) for at in range(0, len(micros) + 1, _SLICE)]
        return spread(pl.concat([pl.concat(parts).set_sorted(), *others]))


_SLICE = 1_000_000


def _seconds(micros: pl.Series) -> pl.Series:
    """Exactly the numbers that Polars reads from the decimals of a table."""
    # Polars does not divide by a single number: it multiplies by the inverse, which is not exact.
    return micros / pl.repeat(1e6, len(micros), eager=True)
