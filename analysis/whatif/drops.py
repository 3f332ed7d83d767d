# SPDX-License-Identifier: Apache-2.0
"""When was the prefix cache emptied on purpose, as a whole or by a content?

A training loop resets the cache after an update of the weights, sleep mode before it gives memory
back, a KV connector evicts contents on request. No pool of another size would have kept them, so a
replay drops them, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.tables.session import Session

EVERYTHING = -1
"""In place of a content id: a reset."""

HALF_TICK_SEC = 0.5e-6
"""Times are rounded to microseconds. What has the same one as a reset came after it: between an
admission and a reset lies a step."""


@dataclass(frozen=True)
class Drops:
    """Arrays with an entry for each, in order of time.

    ``at_sec``: since the session began. ``content``: the content id, or ``EVERYTHING``.
    ``engine``: the data-parallel rank. ``at_rest``: no request of the engine was between its
    admission and its end at that moment.
    """

    at_sec: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    content: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    engine: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    at_rest: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    def __len__(self) -> int:
        return len(self.at_sec)

    @property
    def is_reset(self) -> NDArray[np.bool_]:
        """Whether each is a reset."""
        return np.asarray(self.content == EVERYTHING, np.bool_)

    def take(self, chosen: NDArray[np.bool_]) -> Drops:
        """Those that are chosen."""
        return Drops(
            self.at_sec[chosen], self.content[chosen], self.engine[chosen], self.at_rest[chosen]
        )

    def of_engine(self, rank: int) -> Drops:
        """Those of one data-parallel rank."""
        return self.take(self.engine == rank)

    def resets(self) -> Drops:
        """The resets alone: where blocks have another size, contents have other ids."""
        return self.take(self.is_reset)


def read(
    session: Session,
    admitted_sec: NDArray[np.float64],
    finish_sec: NDArray[np.float64],
    engine: NDArray[np.int64],
) -> Drops:
    """What the session dropped on purpose, its warm-up included.

    Args:
        session: the session.
        admitted_sec: of its requests; NaN where not known.
        finish_sec: of the same requests; NaN where not known.
        engine: of the same requests.

    Raises:
        SessionError: a table cannot be read.

    """
    resets = session.collect(
        "kv_cache_allocations",
        lambda table: (
            table.filter(pl.col("event") == "reset")
            .select(pl.col("timestamp_sec"), pl.col("engine").fill_null(0))
            .unique()
        ),
        history=True,
    ).with_columns(content=pl.lit(EVERYTHING, pl.Int64))
    contents = session.collect(
        "kv_cache_evictions",
        lambda table: table.filter(
            (pl.col("reason") == "explicit")
            & (pl.col("copies_left").fill_null(0) == 0)
            & (pl.col("group").fill_null(0) == 0)
        ).select(
            pl.col("timestamp_sec"), pl.col("engine").fill_null(0), content=pl.col("content_id")
        ),
        history=True,
    ).drop_nulls("content")
    kinds = pl.Schema({"timestamp_sec": pl.Float64, "engine": pl.Int64, "content": pl.Int64})
    rows = pl.concat([resets.cast(kinds), contents.cast(kinds).select(resets.columns)]).sort(
        "timestamp_sec", "engine", "content"
    )
    at, ranks = rows["timestamp_sec"].to_numpy(), rows["engine"].to_numpy()
    at_rest = np.ones(len(at), np.bool_)
    for rank in np.unique(ranks):
        own, of = engine == rank, ranks == rank
        begin, end = admitted_sec[own], finish_sec[own]
        known = np.isfinite(begin) & np.isfinite(end)
        begun = np.searchsorted(np.sort(begin[known]), at[of] - HALF_TICK_SEC)
        at_rest[of] = begun == np.searchsorted(np.sort(end[known]), at[of] + HALF_TICK_SEC)
    return Drops(at, rows["content"].to_numpy(), ranks, at_rest)
