# SPDX-License-Identifier: Apache-2.0
"""Which runs of blocks do several requests have in common?

What a block holds is told by all tokens up to its end, so requests that share a block share those
before it: prompts that share a system prompt and then part have one run of blocks in common, and
what holds for one of its blocks holds for all. So the questions about shared contents are answered
for runs, of which there are far fewer than blocks.
"""

from __future__ import annotations

import polars as pl

from analysis.prefix.prompts import ENGINES, Prompts

_FLAGS = ("made", "in_prompt", "asked", "found")


def in_common(prompts: Prompts) -> pl.DataFrame:
    """One row for each run of blocks in a request of which the same other requests have each
    block, on any engine, and did the same with it; what no other request has is left out.

    Columns: ``key`` and ``last_key``, of the first and the last block; ``request``, ``index`` (of
    the first block), ``blocks``, ``at`` (the first block's row in ``contents``); and as in
    ``contents`` ``made`` and ``in_prompt``. ``asked``: they are some of the prompt's blocks that a
    lookup can find, of a lookup in the window; ``found``: this lookup found them in the cache.
    """
    rows = _flagged(_of_several(prompts.contents), prompts.asked)
    # Which requests they are is told by a sum of hashes: it takes no room, and no order.
    code = pl.col("request").cast(pl.UInt64)
    for flag in _FLAGS:
        code = 2 * code + pl.col(flag).cast(pl.UInt64)
    contents = rows.select(content=pl.col("key") // ENGINES)
    before = pl.when(_goes_on()).then(contents["content"].shift(1)).otherwise(-1)
    signatures = (
        rows.lazy()
        .select(content=contents["content"], code=code.hash(), before=before)
        .group_by("content")
        .agg(
            many=pl.len(),
            alike=pl.col("code").sum(),
            # In no prompt of vLLM's does a content follow another one than elsewhere.
            parted=pl.col("before").min() != pl.col("before").max(),
        )
        .collect()
    )
    # Apart from the other columns, which the join would copy.
    known = contents.join(signatures, on="content", how="left", maintain_order="left")
    others = [pl.col(name) != pl.col(name).shift(1) for name in ("many", "alike")]
    begins = pl.any_horizontal(~_goes_on(), "parted", *others)
    return (
        rows.lazy()
        .with_columns(known.drop("content").get_columns())
        .with_columns(run=begins.fill_null(value=True).cum_sum().set_sorted())
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("key", "request", "index", "at", *_FLAGS).first(),
            last_key=pl.col("key").last(),
            blocks=pl.len().cast(pl.Int64),
        )
        .drop("run")
        .collect()
    )


def _goes_on() -> pl.Expr:
    """Whether a row is the block after the one in the row before."""
    same = pl.col("request") == pl.col("request").shift(1)
    return (same & (pl.col("at") == pl.col("at").shift(1) + 1)).fill_null(value=False)


def _of_several(contents: pl.DataFrame) -> pl.DataFrame:
    """The rows of contents that more than one request has, each with its number ``at``."""
    # Sorting takes less memory than grouping.
    ids: pl.Series = (contents["key"] // ENGINES).sort()
    again = ids.filter(ids == ids.shift(1)).unique()
    return (
        contents.lazy()
        .with_row_index("at")
        .join(
            pl.LazyFrame({"content": again}),
            left_on=pl.col("key") // ENGINES,
            right_on="content",
            how="semi",
            maintain_order="left",
        )
        .collect()
    )


def _flagged(rows: pl.DataFrame, asked: pl.DataFrame) -> pl.DataFrame:
    """The rows with ``asked`` and ``found``."""
    size = pl.col("block_size")
    # The last token is always computed, so a block that ends with it is never found.
    lookups = (
        asked.drop_nulls("request")
        .unique("request", keep="last")
        .select(
            "request",
            reach=pl.when("in_window").then((pl.col("query_tokens") - 1) // size),
            hit=pl.col("hit_tokens") // size,
        )
    )
    known = rows.select("request").join(lookups, on="request", how="left", maintain_order="left")
    return rows.with_columns(
        asked=(rows["in_prompt"] & (rows["index"] < known["reach"])).fill_null(value=False),
        found=(rows["index"] < known["hit"]).fill_null(value=False),
    )
