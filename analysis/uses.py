# SPDX-License-Identifier: Apache-2.0
"""Which contents did more than one request use, and when was each last used before?

A request uses the contents that it found or computed, from its admission to its end, a time in
which it was preempted included. What only one request used is not here: there is no reuse of it,
and in most sessions it is nearly everything.
"""

from __future__ import annotations

import polars as pl

from analysis.prompts import Prompts


def spans(prompts: Prompts) -> pl.DataFrame:
    """``request``, ``order``, ``begin_sec``, ``end_sec`` of every request that ran."""
    return prompts.runs.group_by("request").agg(
        pl.col("order", "begin_sec").min(), pl.col("end_sec").max()
    )


def shared(prompts: Prompts) -> pl.DataFrame:
    """One row for each use of a content that several requests used, by content and admission.

    Columns: ``key``, ``request``, ``order`` (of its admission), ``index``, ``begin_sec``,
    ``end_sec``; ``previous_sec``, when the request that used it before was admitted, and
    ``latest_sec``, when the last of those before ended, both null for the first use; ``asked``, it
    is one of the prompt's blocks that a lookup can find, of a lookup in the window; ``found``, this
    lookup found it in the cache.
    """
    size = pl.col("block_size")
    # The last token is always computed, so a block that ends with it is never found.
    asked = prompts.asked.drop_nulls("request").select(
        "request",
        "in_window",
        reach=((pl.col("query_tokens") - 1) // size).cast(pl.Int32),
        hit=(pl.col("hit_tokens") // size).cast(pl.Int32),
    )
    known = spans(prompts).join(asked, on="request", how="left").sort("order")
    used = _by_admission(prompts, known)

    def of_request(name: str) -> pl.Series:
        return known[name].gather(used["at"])

    same = pl.col("key") == pl.col("key").shift(1)
    in_reach = (
        pl.col("in_prompt") & of_request("in_window") & (pl.col("index") < of_request("reach"))
    )
    return used.select(
        "key",
        "index",
        of_request("request"),
        of_request("order"),
        of_request("begin_sec"),
        of_request("end_sec"),
        asked=in_reach.fill_null(value=False),
        found=(pl.col("index") < of_request("hit")).fill_null(value=False),
    ).with_columns(
        previous_sec=pl.when(same).then(pl.col("begin_sec").shift(1)),
        latest_sec=pl.when(same).then(pl.col("end_sec").cum_max().over("key").shift(1)),
    )


def _by_admission(prompts: Prompts, known: pl.DataFrame) -> pl.DataFrame:
    """``key``, ``index`` and ``in_prompt`` of the contents that several requests used, and the row
    ``at`` which each request is in ``known``, by content and admission: what is sorted is kept
    narrow, as it can be millions of rows."""
    made = prompts.contents.lazy().filter("made")
    keys = made.select("key").collect()["key"].sort(in_place=True)
    again = keys.filter(keys == keys.shift(1))
    several = again.filter(again.ne_missing(again.shift(1)))
    # One column after the other takes a fifth of the time of both at once, which is what a lazy
    # frame makes of it.
    return (
        made.join(pl.LazyFrame({"key": several}), on="key", how="semi")
        .join(known.lazy().select("request").with_row_index("at"), on="request")
        .select("key", "index", "in_prompt", "at")
        .collect()
        .sort("at")
        .sort("key", maintain_order=True)
    )


def returns(uses: pl.DataFrame) -> pl.DataFrame:
    """What came of the blocks that each request computed itself: ``request``, ``asked`` and
    ``found``, how often later requests asked for one of them, and found it in the cache."""
    after = [
        pl.col(name).cast(pl.Int64).cum_sum(reverse=True).over("key") - pl.col(name)
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
