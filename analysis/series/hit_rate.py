# SPDX-License-Identifier: Apache-2.0
"""How did the true hit rate change over time?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.series.bins import Bins
from analysis.tables import lookups
from analysis.tables.session import Session


@dataclass(frozen=True)
class HitRate:
    """Prompt tokens found in the cache, of those that admitted requests asked for, from 0 to 1.

    ``in_bin``: of the requests admitted in each bin, None where there is none. ``so_far``: of all
    requests up to the bin's end, None before the first; its last value is the session's true hit
    rate. ``query_tokens``: tokens asked for in each bin.
    """

    in_bin: tuple[float | None, ...]
    so_far: tuple[float | None, ...]
    query_tokens: tuple[int, ...]


def measure(session: Session, bins: Bins) -> HitRate:
    """The rate over all engines.

    Raises:
        SessionError: the table cannot be read.

    """
    hit, query = pl.col("hit_tokens"), pl.col("query_tokens")
    by_bin = (
        bins.dense(
            lookups.admitted(session)
            .group_by(bins.of(pl.col("timestamp_sec")))
            .agg(hit.sum(), query.sum())
        )
        .with_columns(pl.col("hit_tokens", "query_tokens").fill_null(0))
        .select(
            "query_tokens",
            in_bin=pl.when(query > 0).then(hit / query),
            so_far=pl.when(query.cum_sum() > 0).then(hit.cum_sum() / query.cum_sum()),
        )
    )
    return HitRate(
        in_bin=tuple(by_bin["in_bin"].to_list()),
        so_far=tuple(by_bin["so_far"].to_list()),
        query_tokens=tuple(by_bin["query_tokens"].to_list()),
    )
