# SPDX-License-Identifier: Apache-2.0
"""Which stretches of blocks do several requests have in common?

A content depends on all tokens up to the end of its block, so requests that share a block share
all before it. Prompts that share a system prompt and then part have one stretch of blocks in
common, and what holds for one block of it holds for all. There are far fewer stretches than
blocks, so questions about shared contents are answered by stretch.
"""

from __future__ import annotations

import polars as pl

from analysis.prefix.prompts import ENGINES, Prompts

_FLAGS = ("made", "in_prompt", "asked", "found")


def in_common(prompts: Prompts) -> pl.DataFrame:
    """A row for each stretch of a request: blocks that the same other requests have, on any engine.

    All of these requests did the same with each block of a stretch. Blocks that no other request
    has are left out.

    Columns: ``key`` and ``last_key`` (of the first and the last block); ``request``; ``index`` (of
    the first block); ``blocks`` (how many); ``at`` (the row of the first block in ``contents``);
    ``made`` and ``in_prompt``, as in ``contents``; ``asked`` (a lookup in the window could find
    these blocks of its prompt), ``found`` (it did).

    Args:
        prompts: of the session, with their contents.

    """
    rows = _flagged(_of_several(prompts.contents), prompts.asked)
    # A sum of hashes stands for a set of requests: it takes no room, and needs no order.
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
            # A content follows the same one everywhere in vLLM, but perhaps not in made-up tables.
            parted=pl.col("before").min() != pl.col("before").max(),
        )
        .collect()
    )
    # Joined apart from the other columns, which it would copy.
    known = contents.join(signatures, on="content", how="left", maintain_order="left")
    others = [pl.col(name) != pl.col(name).shift(1) for name in ("many", "alike")]
    begins = pl.any_horizontal(~_goes_on(), "parted", *others)
    return (
        rows.lazy()
        .with_columns(known.drop("content").get_columns())
        .with_columns(stretch=begins.fill_null(value=True).cum_sum().set_sorted())
        .group_by("stretch", maintain_order=True)
        .agg(
            pl.col("key", "request", "index", "at", *_FLAGS).first(),
            last_key=pl.col("key").last(),
            blocks=pl.len().cast(pl.Int64),
        )
        .drop("stretch")
        .collect()
    )


def _goes_on() -> pl.Expr:
    """Whether a row is the block after the one in the row before."""
    same = pl.col("request") == pl.col("request").shift(1)
    return (same & (pl.col("at") == pl.col("at").shift(1) + 1)).fill_null(value=False)


def _of_several(contents: pl.DataFrame) -> pl.DataFrame:
    """The rows of contents that more than one request has, with their row numbers ``at``."""
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
    """The rows with ``asked`` and ``found``, as ``in_common`` defines them."""
    size = pl.col("block_size")
    # vLLM always computes the last token, so no lookup finds a block that ends with it.
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
