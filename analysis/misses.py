# SPDX-License-Identifier: Apache-2.0
"""Why did the prefix cache miss?

Every full block of an admitted request's prompt that was not found gets one reason, by what was
known of its content when the request was looked up:

``last token``
    The block ends the prompt. vLLM always computes the last token, so it cannot be found.
``speculation``
    It was found, and given up again: speculative decoding with a draft head computes the last
    block of a hit anew.
``not yet cached``
    A running request with the same prefix had not computed it yet.
``capacity``
    It had been cached, and its last copy had been evicted.
``held back``
    It was cached, and another KV cache group lacked it.
``behind``
    It was cached, and a block before it was not, so it could not be reached.
``other rank``
    This engine never had it; another data-parallel rank's cache held it.
``compulsory``
    No request had computed it before.
``unknown``
    The request had not ended when the session did, so its contents are not told.

With one KV cache group of full attention these are exact: a running request holds what it has
computed, so a block that is missed while it is in its prefill is one that it has not computed
yet; and what it has computed stays cached until the eviction that leaves no copy. With several
groups they speak of the first group of full attention, and a hit ends where another one lacks
what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.prompts import ENGINES, KEY, Prompts

REASONS = (
    "compulsory",
    "capacity",
    "not yet cached",
    "held back",
    "behind",
    "other rank",
    "last token",
    "speculation",
    "unknown",
)
REASON = pl.Enum(REASONS)

EVICTION_COLUMNS = (
    "timestamp_sec",
    "content_id",
    "copies_left",
    "evicting_request",
    "engine",
    "group",
)


@dataclass
class Evicted:
    """The evictions, seen so far, of ``wanted`` contents and of which no copy was left.

    ``eviction`` is a row's number in kv_cache_evictions.csv, from 0.
    """

    wanted: pl.Series
    parts: list[pl.DataFrame] = field(default_factory=list)
    seen: int = 0

    def add(self, batch: pl.DataFrame) -> None:
        self.parts.append(
            batch.with_row_index("eviction", offset=self.seen)
            .lazy()
            .filter(pl.col("copies_left").fill_null(0) == 0)
            .join(pl.LazyFrame({"content_id": self.wanted}), on="content_id", how="semi")
            .select(
                "eviction",
                key=KEY,
                evicted_sec="timestamp_sec",
                evicting_request="evicting_request",
                group=pl.col("group").fill_null(0).cast(pl.Int32),
            )
            .collect()
        )
        self.seen += batch.height

    def result(self) -> pl.DataFrame:
        empty = pl.DataFrame(
            schema={
                "eviction": pl.UInt32,
                "key": pl.Int64,
                "evicted_sec": pl.Float64,
                "evicting_request": pl.String,
                "group": pl.Int32,
            }
        )
        return pl.concat([empty, *self.parts])


def missed(prompts: Prompts) -> pl.DataFrame:
    """Every full block that an admitted request asked for and did not find, in the window.

    Columns: ``lookup``, ``order``, ``request``, ``timestamp_sec``, ``index``, ``key``, ``first``
    (the first one that this lookup missed), ``ends_prompt``, ``seen`` (some other request has the
    content, too).
    """
    found = pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0)
    asked = prompts.asked.lazy().filter("in_window").drop_nulls("request")
    content = pl.col("key") // ENGINES
    several = prompts.contents.lazy().group_by(content=content).agg(seen=pl.len() > 1)
    return (
        prompts.contents.lazy()
        .filter("in_prompt")
        .select("key", "request", "index", content=content)
        .join(
            asked.select(
                "lookup",
                "order",
                "request",
                "timestamp_sec",
                begin=found // pl.col("block_size"),
                end=pl.col("query_tokens") // pl.col("block_size"),
                whole=pl.col("query_tokens") % pl.col("block_size") == 0,
            ),
            on="request",
        )
        .filter(pl.col("index").is_between("begin", "end", closed="left"))
        .join(several, on="content", how="left")
        .select(
            "lookup",
            "order",
            "request",
            "timestamp_sec",
            "index",
            "key",
            "seen",
            first=pl.col("index") == pl.col("begin"),
            ends_prompt=pl.col("whole") & (pl.col("index") == pl.col("end") - 1),
        )
        .collect()
    )


def wanted(blocks: pl.DataFrame) -> pl.Series:
    """The content ids whose history decides why these blocks were missed."""
    return blocks.filter("seen").select(content_id=pl.col("key") // ENGINES)["content_id"].unique()


def classify(
    blocks: pl.DataFrame,
    prompts: Prompts,
    evicted: pl.DataFrame,
    *,
    group: int = 0,
    drops_hit_block: bool = False,
) -> pl.DataFrame:
    """The missed blocks with their ``reason``.

    For ``capacity``: ``evicted_sec``, ``eviction`` (row number) and ``evicting_request`` of the
    eviction that lost the content. For ``not yet cached``: ``computing``, the number of the
    request that was computing it. For ``other rank``: ``rank``. For ``held back``:
    ``lacking_group``, if an eviction tells it.

    Args:
        blocks: what ``missed`` found.
        prompts: of the same session.
        evicted: what ``Evicted`` found for ``wanted(blocks)``.
        group: the KV cache group that is spoken of.
        drops_hit_block: speculative decoding gives the last block of a hit up again.

    """
    known = blocks.filter("seen")
    holders = _holders(known, prompts)
    own = _history(known, holders, evicted.filter(pl.col("group") == group))
    dropped = pl.lit(drops_hit_block) & pl.col("first") & (pl.col("index") > 0)
    cached = pl.when("first").then(pl.lit("held back")).otherwise(pl.lit("behind"))
    reason = (
        pl.when("ends_prompt")
        .then(pl.lit("last token"))
        .when(dropped)
        .then(pl.lit("speculation"))
        .when(pl.col("computing").is_not_null())
        .then(pl.lit("not yet cached"))
        .when(pl.col("evicted_sec").is_not_null())
        .then(pl.lit("capacity"))
        .when("cached")
        .then(cached)
        .when(pl.col("rank").is_not_null())
        .then(pl.lit("other rank"))
        .otherwise(pl.lit("compulsory"))
    )
    place = ["lookup", "index"]
    return (
        blocks.join(own, on=place, how="left")
        .join(_other_ranks(known, holders, evicted, group), on=place, how="left")
        .join(_lacking_groups(known, own, evicted, group), on=place, how="left")
        .with_columns(reason=reason.cast(REASON))
    )


def _holders(blocks: pl.DataFrame, prompts: Prompts) -> pl.DataFrame:
    """Which requests computed these contents, on any engine, and when.

    ``computing_sec``: until when it was being computed; ``made_sec``: since when it was there,
    null where that run did not get so far.
    """
    first_token = pl.col("first_token_sec")
    in_prefill = first_token.is_between("begin_sec", "end_sec")
    return (
        prompts.contents.lazy()
        .with_columns(content=pl.col("key") // ENGINES)
        .join(
            blocks.lazy().select(content=pl.col("key") // ENGINES).unique(),
            on="content",
            how="semi",
        )
        .join(prompts.runs.lazy(), on="request")
        .select(
            "content",
            "order",
            "request",
            engine=pl.col("key") % ENGINES,
            computing_sec=pl.when(in_prefill & pl.col("in_prompt"))
            .then(first_token)
            .otherwise("end_sec"),
            made_sec=pl.when("made").then(
                pl.when(in_prefill & pl.col("in_prompt"))
                .then(first_token)
                .when("last")
                .then("end_sec")
            ),
        )
        .collect()
    )


def _history(blocks: pl.DataFrame, holders: pl.DataFrame, evicted: pl.DataFrame) -> pl.DataFrame:
    """What had become of each block's content on the engine of its key when it was looked up.

    ``computing``: the request that was computing it; ``cached``; or the eviction that lost it.
    """
    keyed = holders.with_columns(key=pl.col("content") * ENGINES + pl.col("engine"))
    computing = (
        keyed.sort("order")
        .with_columns(latest_sec=pl.col("computing_sec").cum_max().over("key"))
        .with_columns(
            computing=pl.when(pl.col("computing_sec") == pl.col("latest_sec"))
            .then("request")
            .forward_fill()
            .over("key")
        )
        .select("key", "order", "latest_sec", "computing")
    )
    made = keyed.drop_nulls("made_sec").select("key", "made_sec").sort("made_sec")
    lost = evicted.select("key", "evicted_sec", "eviction", "evicting_request").sort("evicted_sec")
    is_lost = pl.col("evicted_sec").is_not_null() & (
        pl.col("made_sec").is_null() | (pl.col("evicted_sec") >= pl.col("made_sec"))
    )
    return (
        blocks.select("lookup", "index", "key", "order", "timestamp_sec")
        .sort("order")
        .join_asof(
            computing, on="order", by="key", allow_exact_matches=False, check_sortedness=False
        )
        .sort("timestamp_sec")
        .join_asof(
            made,
            left_on="timestamp_sec",
            right_on="made_sec",
            by="key",
            allow_exact_matches=False,
            check_sortedness=False,
        )
        .join_asof(
            lost, left_on="timestamp_sec", right_on="evicted_sec", by="key", check_sortedness=False
        )
        .select(
            "lookup",
            "index",
            "made_sec",
            *(
                pl.when(is_lost).then(pl.col(name)).alias(name)
                for name in ("evicted_sec", "eviction", "evicting_request")
            ),
            computing=pl.when(pl.col("latest_sec") > pl.col("timestamp_sec")).then("computing"),
            cached=pl.col("made_sec").is_not_null() & ~is_lost,
        )
    )


def _other_ranks(
    blocks: pl.DataFrame, holders: pl.DataFrame, evicted: pl.DataFrame, group: int
) -> pl.DataFrame:
    """The lowest rank whose cache held a block's content that this block's own engine lacked."""
    found = [
        _history(
            blocks.filter(pl.col("key") % ENGINES != rank).with_columns(
                key=pl.col("key") // ENGINES * ENGINES + rank
            ),
            holders.filter(pl.col("engine") == rank),
            evicted.filter((pl.col("group") == group) & (pl.col("key") % ENGINES == rank)),
        )
        .filter("cached")
        .select("lookup", "index", rank=pl.lit(rank, pl.Int64))
        for rank in _ranks(holders)
    ]
    none = pl.DataFrame(schema={"lookup": pl.UInt32, "index": pl.UInt32, "rank": pl.Int64})
    return pl.concat([none, *found]).unique(["lookup", "index"], keep="first", maintain_order=True)


def _ranks(holders: pl.DataFrame) -> list[int]:
    """The engines that computed any of it; none where there is one alone."""
    ranks = holders["engine"].unique().sort().to_list()
    return ranks if len(ranks) > 1 else []


def _lacking_groups(
    blocks: pl.DataFrame, own: pl.DataFrame, evicted: pl.DataFrame, group: int
) -> pl.DataFrame:
    """For cached blocks the other group that had lost the content since it was computed."""
    others = (
        evicted.filter(pl.col("group") != group)
        .select("key", lost_sec="evicted_sec", lacking_group="group")
        .sort("lost_sec")
    )
    return (
        own.filter("cached")
        .select("lookup", "index", "made_sec")
        .join(blocks.select("lookup", "index", "key", "timestamp_sec"), on=["lookup", "index"])
        .sort("timestamp_sec")
        .join_asof(
            others, left_on="timestamp_sec", right_on="lost_sec", by="key", check_sortedness=False
        )
        .filter(pl.col("lost_sec") >= pl.col("made_sec"))
        .select("lookup", "index", "lacking_group")
    )
