# SPDX-License-Identifier: Apache-2.0
"""How many blocks were allocated, reused and freed, and by how many calls?"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

TABLE = "kv_cache_allocations"
COLUMNS = ("event", "num_blocks", "evicted_blocks")
_COUNTS = ("calls", "num_blocks", "evicted_blocks")


@dataclass(frozen=True)
class Moved:
    """``calls`` calls moved ``blocks`` blocks and evicted ``evicted_blocks`` cached ones."""

    blocks: int = 0
    calls: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True)
class Allocations:
    """The blocks that moved, by event. ``cached``: those whose content became reusable.

    ``resets`` and ``resets_refused``: prefix-cache resets that vLLM carried out and refused.
    """

    allocated: Moved
    reused: Moved
    freed: Moved
    cached: Moved
    resets: int
    resets_refused: int


@dataclass
class AllocationTally:
    """Sums the rows of kv_cache_allocations.csv up by event."""

    sums: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        self.sums.append(
            batch.group_by("event").agg(
                pl.len().cast(pl.Int64).alias("calls"),
                pl.col("num_blocks", "evicted_blocks").sum(),
            )
        )

    def result(self) -> Allocations:
        empty = pl.DataFrame(schema={"event": pl.String, **dict.fromkeys(_COUNTS, pl.Int64)})
        sums = pl.concat([empty, *self.sums]).group_by("event").agg(pl.col(_COUNTS).sum())
        known = {
            event: Moved(blocks, calls, evicted)
            for event, calls, blocks, evicted in sums.select("event", *_COUNTS).iter_rows()
        }

        def moved(event: str) -> Moved:
            return known.get(event, Moved())

        return Allocations(
            allocated=moved("allocate"),
            reused=moved("reuse"),
            freed=moved("free"),
            cached=moved("cache"),
            resets=moved("reset").calls,
            resets_refused=moved("reset_refused").calls,
        )
