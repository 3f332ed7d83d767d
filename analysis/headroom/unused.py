# SPDX-License-Identifier: Apache-2.0
"""How much of the KV cache's memory was never used?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.pool.usage import TABLE
from analysis.tables.facts import Facts
from analysis.tables.session import Session


@dataclass(frozen=True)
class Unused:
    """A pool of ``blocks``. ``held``: the most that requests held at once. ``taken``: the most that
    were held or cached at once. ``never_held`` and ``never_taken``: the others.
    ``never_held_bytes`` and ``never_taken_bytes``: the same on each GPU, None where the size of a
    block is not known."""

    engine: int
    pool: int
    blocks: int
    held: int
    taken: int
    never_held: int
    never_taken: int
    never_held_bytes: int | None
    never_taken_bytes: int | None


def measure(session: Session, facts: Facts) -> tuple[Unused, ...]:
    """The pools of the session, by engine and pool.

    Raises:
        SessionError: the table cannot be read.

    """
    held, cached = pl.col("num_blocks"), pl.col("cached_blocks")
    rows = session.collect(
        TABLE,
        lambda table: table.group_by("engine", "pool").agg(
            blocks=pl.col("total_blocks").last(), held=held.max(), taken=(held + cached).max()
        ),
    ).sort("engine", "pool")
    size = facts.bytes_per_block
    return tuple(
        Unused(
            engine=engine,
            pool=pool,
            blocks=blocks,
            held=most_held,
            taken=taken,
            never_held=blocks - most_held,
            never_taken=blocks - taken,
            never_held_bytes=None if size is None else size * (blocks - most_held),
            never_taken_bytes=None if size is None else size * (blocks - taken),
        )
        for engine, pool, blocks, most_held, taken in rows.iter_rows()
    )
