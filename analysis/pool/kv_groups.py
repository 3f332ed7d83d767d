# SPDX-License-Identifier: Apache-2.0
"""Which KV cache group's contents fill the pool?

Groups with different kinds of attention share one pool and its queue of free blocks. A sliding
window frees blocks while a request runs. So its group puts more blocks into the queue than it
holds, and can push the contents of other groups out while usage is low.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.tables.facts import Facts
from analysis.tables.session import Session


@dataclass(frozen=True)
class Contents:
    """One group's blocks, warm-up included, since the pool filled up then, too.

    ``kind``: vLLM's name for its kind of attention. ``block_size``: tokens. ``allocated``: blocks
    that were handed out. ``cached``: blocks whose content became reusable. ``evicted``: blocks
    that lost their content. ``left``: contents in the pool at the end, held or not; ``share``: of
    those of all groups, from 0 to 1.
    """

    group: int
    kind: str | None
    block_size: int | None
    allocated: int
    cached: int
    evicted: int
    left: int
    share: float | None


def measure(session: Session, facts: Facts) -> tuple[Contents, ...]:
    """The groups in their order; empty for a model with one group.

    Raises:
        SessionError: a table cannot be read.

    """
    if len(facts.groups) < 2:
        return ()
    moves = session.collect(
        "kv_cache_allocations",
        lambda table: (
            table.filter(pl.col("event").is_in(["allocate", "cache"]))
            .group_by("group", "event")
            .agg(pl.col("num_blocks").sum())
        ),
        history=True,
    )
    evictions = session.collect(
        "kv_cache_evictions",
        lambda table: table.group_by("group").agg(num_blocks=pl.len().cast(pl.Int64)),
        history=True,
    )
    allocated = _by_group(moves.filter(pl.col("event") == "allocate"))
    cached = _by_group(moves.filter(pl.col("event") == "cache"))
    evicted = _by_group(evictions)
    left = {
        group: cached.get(group, 0) - evicted.get(group, 0) for group in range(len(facts.groups))
    }
    every = sum(left.values())
    return tuple(
        Contents(
            group=number,
            kind=group.kind,
            block_size=group.block_size,
            allocated=allocated.get(number, 0),
            cached=cached.get(number, 0),
            evicted=evicted.get(number, 0),
            left=left[number],
            share=left[number] / every if every else None,
        )
        for number, group in enumerate(facts.groups)
    )


def _by_group(rows: pl.DataFrame) -> dict[int, int]:
    return dict(rows.select("group", "num_blocks").drop_nulls().iter_rows())
