# SPDX-License-Identifier: Apache-2.0
"""How many blocks were handed out, taken up again and let go, and by how many calls?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.session import Session

TABLE = "kv_cache_allocations"


@dataclass(frozen=True)
class Moved:
    """``blocks`` moved by ``calls`` calls, which destroyed ``evicted_blocks`` cached contents."""

    blocks: int = 0
    calls: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True)
class Allocations:
    """What moved, by event; ``resets`` and ``resets_refused`` count prefix-cache resets."""

    allocated: Moved
    reused: Moved
    freed: Moved
    cached: Moved
    resets: int
    resets_refused: int


def measure(session: Session) -> Allocations:
    """The sums over kv_cache_allocations.csv, all engines and pools.

    Raises:
        SessionError: the table cannot be read.

    """
    sums = session.collect(
        TABLE,
        lambda table: table.group_by("event", "engine").agg(
            pl.len(), pl.col("num_blocks").sum(), pl.col("evicted_blocks").sum()
        ),
    )

    def moved(event: str) -> Moved:
        rows = sums.filter(pl.col("event") == event)
        return Moved(
            blocks=int(rows["num_blocks"].sum()),
            calls=int(rows["len"].sum()),
            evicted_blocks=int(rows["evicted_blocks"].sum()),
        )

    return Allocations(
        allocated=moved("allocate"),
        reused=moved("reuse"),
        freed=moved("free"),
        cached=moved("cache"),
        resets=moved("reset").calls,
        resets_refused=moved("reset_refused").calls,
    )
