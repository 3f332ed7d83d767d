# SPDX-License-Identifier: Apache-2.0
"""Which contents did more than one request use, and when did each request use them?

A request uses the contents that it finds or computes, from its admission to its end, also while it
is preempted. Contents that only one request used are left out. In most sessions that is nearly all
of them.
"""

from __future__ import annotations

import polars as pl

from analysis.prefix.prompts import Prompts


def spans(prompts: Prompts) -> pl.DataFrame:
    """A row for each request that ran, from its first admission to its end.

    Columns: ``request``, ``order`` and ``begin_sec`` (of its first admission), ``end_sec``.
    """
    return prompts.stints.group_by("request").agg(
        pl.col("order", "begin_sec").min(), pl.col("end_sec").max()
    )


def uses(prompts: Prompts, stretches: pl.DataFrame) -> pl.DataFrame:
    """A row for each request's use of a stretch that several requests used.

    The rows are sorted by stretch, then by admission. Columns: ``key``, ``last_key``, ``request``,
    ``index``, ``blocks``, ``asked`` and ``found``, as in ``stretches``; ``order`` (of the request's
    first admission), ``begin_sec``, ``end_sec``; ``previous_sec`` (when the request was admitted
    that used the stretch before) and ``latest_sec`` (when the last of all requests before ended).
    Both are null for the first use.

    Args:
        prompts: of the session.
        stretches: what ``analysis.prefix.stretches.in_common`` returns.

    """
    same = pl.col("key") == pl.col("key").shift(1)
    return (
        stretches.filter("made")
        .filter(pl.len().over("key") > 1)
        .join(spans(prompts), on="request")
        .sort("key", "order")
        .select(
            *("key", "last_key", "request", "index", "blocks", "asked", "found"),
            *("order", "begin_sec", "end_sec"),
            previous_sec=pl.when(same).then(pl.col("begin_sec").shift(1)),
            latest_sec=pl.when(same).then(pl.col("end_sec").cum_max().over("key").shift(1)),
        )
    )


def reuse_gaps(uses: pl.DataFrame) -> pl.DataFrame:
    """A row for each block that a request asked for and an earlier one had used.

    Columns: ``found`` (in the cache), ``gap`` (seconds from the admission of the request that used
    it before to that of this one).

    Args:
        uses: what ``uses`` returns.

    """
    again = uses.filter(pl.col("asked") & pl.col("previous_sec").is_not_null())
    gaps = again.select("found", gap=pl.col("begin_sec") - pl.col("previous_sec"))
    repeated = gaps.select(pl.all().repeat_by(again["blocks"]))
    return repeated.explode("found", "gap", empty_as_null=False)


def asked_again(uses: pl.DataFrame) -> pl.DataFrame:
    """A row for each request that computed a block which several requests used.

    Columns: ``request``; ``asked`` and ``found``, how often later requests asked for one of the
    blocks that it computed, and found one in the cache.

    Args:
        uses: what ``uses`` returns.

    """
    after = [
        (pl.col(name).cast(pl.Int64).cum_sum(reverse=True).over("key") - pl.col(name))
        * pl.col("blocks")
        for name in ("asked", "found")
    ]
    return (
        uses.lazy()
        .select("request", *after, computed=~pl.col("found"))
        .filter("computed")
        .group_by("request")
        .agg(pl.col("asked", "found").sum())
        .collect()
    )
