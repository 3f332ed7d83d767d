# SPDX-License-Identifier: Apache-2.0
"""Which contents did more than one request use, and when was each last used before?

A request uses the contents that it found or computed, from its admission to its end, a time in
which it was preempted included. What only one request used is not here: there is no reuse of it,
and in most sessions it is nearly everything.
"""

from __future__ import annotations

import polars as pl

from analysis.prefix.prompts import Prompts


def spans(prompts: Prompts) -> pl.DataFrame:
    """``request``, ``order``, ``begin_sec``, ``end_sec`` of every request that ran."""
    return prompts.runs.group_by("request").agg(
        pl.col("order", "begin_sec").min(), pl.col("end_sec").max()
    )


def uses(prompts: Prompts, pieces: pl.DataFrame) -> pl.DataFrame:
    """One row for each use of a piece that several requests used, by piece and admission.

    Columns: ``key``, ``last_key``, ``request``, ``index``, ``blocks``, ``asked`` and ``found``, as
    in the pieces; ``order`` (of the request's admission), ``begin_sec``, ``end_sec``;
    ``previous_sec``, when the request that used it before was admitted, and ``latest_sec``, when
    the last of those before ended, both null for the first use.

    Args:
        prompts: of the session.
        pieces: what ``analysis.prefix.stretches.shared`` found.

    """
    same = pl.col("key") == pl.col("key").shift(1)
    return (
        pieces.filter("made")
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
    """Of every block asked for that a request before had used: the ``gap``, in seconds, from that
    request's admission to this one's, and whether it was ``found``."""
    again = uses.filter(pl.col("asked") & pl.col("previous_sec").is_not_null())
    gaps = again.select("found", gap=pl.col("begin_sec") - pl.col("previous_sec"))
    repeated = gaps.select(pl.all().repeat_by(again["blocks"]))
    return repeated.explode("found", "gap", empty_as_null=False)


def asked_again(uses: pl.DataFrame) -> pl.DataFrame:
    """What came of the blocks that each request computed itself: ``request``, ``asked`` and
    ``found``, how often later requests asked for one of them, and found it in the cache."""
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
