# SPDX-License-Identifier: Apache-2.0
"""Which missed blocks were new to their salt or adapter alone?

A cache salt or an adapter sets contents apart: equal tokens share nothing. Such a request has the
*bare* ids of its prompt's blocks, too, which are those of the same tokens without salt and adapter.
A block that no cache had because no request had computed it (``compulsory``) was new to its salt or
adapter alone if a request with another salt or adapter, or with none, had been admitted before with
the same bare block in its prompt, on any engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.prefix.prompts import ENGINES, Prompts

COLUMNS = ("lora", "tenant", "input_length", "block_size", "bare_hash_ids")
"""Of requests.jsonl."""

_ROWS = {"request": pl.UInt32, "content": pl.Int64, "index": pl.UInt32, "space": pl.String}


@dataclass
class ApartTally:
    """Keeps the bare ids of the requests that a salt or an adapter sets apart.

    ``is_known``: every such request has bare ids for all full blocks of its prompt.
    """

    parts: list[pl.DataFrame] = field(default_factory=list)
    count: int = 0
    is_known: bool = True

    def add(self, batch: pl.DataFrame) -> None:
        full = pl.col("input_length") // pl.col("block_size")
        apart = (
            batch.select(COLUMNS)
            .with_row_index("request", offset=self.count)
            .filter(pl.col("lora").is_not_null() | pl.col("tenant").is_not_null())
            .with_columns(bare=pl.col("bare_hash_ids").list.head(full))
        )
        self.count += batch.height
        if apart.is_empty():
            return
        has_all = (pl.col("bare").list.len() == full).fill_null(value=False)
        self.is_known &= bool(apart.select(has_all.all()).item())
        self.parts.append(
            apart.select(
                "request",
                content=pl.col("bare").fill_null([]),
                index=pl.int_ranges(0, pl.col("bare").list.len().fill_null(0), dtype=pl.UInt32),
                space=_SPACE,
            )
            .explode("content", "index", empty_as_null=False)
            .drop_nulls("content")
        )

    def result(self) -> pl.DataFrame:
        """A row for each full block of their prompts. The tally is empty afterwards.

        Columns: ``request`` (number), ``content`` (bare id), ``index``, ``space`` (the same for
        requests with the same salt and adapter).
        """
        rows = pl.concat([pl.DataFrame(schema=_ROWS), *self.parts])
        self.parts.clear()
        return rows


_SPACE = pl.format(
    "{} {}", pl.col("tenant").cast(pl.String).fill_null(""), pl.col("lora").fill_null("")
)
_NO_SPACE = " "


def came_before(prompts: Prompts, apart: pl.DataFrame) -> pl.DataFrame:
    """The blocks that lookups in the window missed, and that had come before under another salt or
    adapter: whatever the reason for which they were missed.

    Columns: ``lookup`` (as in ``Prompts.asked``), ``index`` (of the block in its prompt).

    Args:
        prompts: of the session, with their contents.
        apart: what ``ApartTally.result`` returns.

    """
    if apart.is_empty():
        return pl.DataFrame(schema={"lookup": pl.UInt32, "index": pl.UInt32})
    lookups = prompts.asked.drop_nulls("request").unique("request", keep="last")
    plain = (
        prompts.contents.lazy()
        .filter("in_prompt")
        .select("request", "index", content=pl.col("key") // ENGINES)
        .join(apart.lazy().select("request").unique(), on="request", how="anti")
        .join(apart.lazy().select("content").unique(), on="content", how="semi")
        .select("request", "content", "index", space=pl.lit(_NO_SPACE))
    )
    rows = (
        pl.concat([apart.lazy(), plain])
        .join(
            lookups.lazy().select(
                "request",
                "lookup",
                "order",
                "in_window",
                "first_missed",
                beyond=pl.col("full_blocks") - pl.col("ends_prompt").cast(pl.Int64),
            ),
            on="request",
        )
        .collect()
    )
    first = rows.group_by("content").agg(
        first=pl.col("order").min(), first_space=pl.col("space").sort_by("order").first()
    )
    known = rows.join(first, on="content")
    others = (
        known.filter(pl.col("space") != pl.col("first_space"))
        .group_by("content")
        .agg(second=pl.col("order").min())
    )
    elsewhere = pl.when(pl.col("space") == pl.col("first_space")).then("second").otherwise("first")
    return (
        known.join(others, on="content", how="left")
        .filter(
            pl.col("in_window")
            & (elsewhere < pl.col("order"))
            & (pl.col("index") >= pl.col("first_missed"))
            & (pl.col("index") < pl.col("beyond"))
        )
        .select(pl.col("lookup").cast(pl.UInt32), "index")
    )


def new_to_their_own(before: pl.DataFrame, missed: pl.DataFrame) -> pl.DataFrame:
    """The blocks of ``came_before`` whose reason is ``compulsory``.

    Args:
        before: what ``came_before`` returns.
        missed: what ``analysis.prefix.misses.classify`` returns.

    """
    explained = missed.filter(pl.col("reason") != "compulsory").select(
        pl.col("lookup").cast(pl.UInt32), pl.col("index").cast(pl.UInt32)
    )
    return before.join(explained, on=["lookup", "index"], how="anti")
