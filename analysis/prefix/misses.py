# SPDX-License-Identifier: Apache-2.0
"""Why did the prefix cache miss?

Every full block of an admitted request's prompt that was not found gets one reason, by what was
known of its content when the request was looked up:

``last token``
    The block ends the prompt. vLLM always computes the last token, so no lookup can find it.
``speculation``
    The lookup found it and gave it up again: speculative decoding with a draft head computes the
    last block of a hit anew.
``not yet cached``
    A running request with the same prefix had not computed it yet.
``capacity``
    It had been cached, and its last copy had been evicted because its room was needed.
``reset``
    It had been cached, and its last copy went when the prefix cache was dropped as a whole.
``explicit``
    It had been cached, and its last copy had been evicted on request.
``held back``
    It was cached, and another KV cache group lacked it.
``behind``
    It was cached, and a block before it was not. A hit needs every block before it.
``other rank``
    This engine never had it, and the cache of another data-parallel rank did.
``compulsory``
    No request had computed it before.
``unknown``
    The request had not ended when the session did, so its contents are not known.

With one KV cache group of full attention the reasons are exact. A running request holds what it
has computed, so what others miss during its prefill is what it has not computed yet; and what it
has computed stays cached until the eviction that leaves no copy. With several groups the reasons
hold for the first group of full attention, and a hit ends where another group lacks a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.pool.evictions import ON_PURPOSE
from analysis.prefix.prompts import ENGINES, KEY, Prompts

REASONS = (
    "compulsory",
    "capacity",
    "reset",
    "explicit",
    "not yet cached",
    "held back",
    "behind",
    "other rank",
    "last token",
    "speculation",
    "unknown",
)
REASON = pl.Enum(REASONS)

_LOSS = pl.Enum(ON_PURPOSE)

EVICTION_COLUMNS = (
    "timestamp_sec",
    "reason",
    "content_id",
    "copies_left",
    "evicting_request",
    "engine",
    "group",
)


@dataclass
class LossTally:
    """Keeps the evictions of ``wanted`` contents that left no copy.

    ``wanted``: content ids. ``seen``: how many rows of kv_cache_evictions.csv have gone by.
    """

    wanted: pl.Series
    parts: list[pl.DataFrame] = field(default_factory=list)
    seen: int = 0

    def add(self, batch: pl.DataFrame) -> None:
        self.parts.append(
            batch.with_row_index("eviction", offset=self.seen)
            .lazy()
            .filter(
                # A join would first copy the rows that it looks up, text included.
                (pl.col("copies_left").fill_null(0) == 0)
                & pl.col("content_id").is_in(self.wanted.implode())
            )
            .select(
                "eviction",
                key=KEY,
                evicted_sec="timestamp_sec",
                on_purpose=pl.col("reason").cast(_LOSS, strict=False),
                evicting_request=pl.col("evicting_request").cast(pl.Categorical),
                group=pl.col("group").fill_null(0).cast(pl.Int32),
            )
            .collect()
        )
        self.seen += batch.height

    def result(self) -> pl.DataFrame:
        """A row for each of these evictions, in the table's order. The tally is empty afterwards.

        Columns: ``eviction`` (the row's number in the table, from 0), ``key`` (of the content),
        ``evicted_sec`` (seconds since the session began), ``on_purpose`` (which of ``ON_PURPOSE``
        it was; null where the room was needed), ``evicting_request`` (null where no request did
        it), ``group``.
        """
        empty = pl.DataFrame(
            schema={
                "eviction": pl.UInt32,
                "key": pl.Int64,
                "evicted_sec": pl.Float64,
                "on_purpose": _LOSS,
                "evicting_request": pl.Categorical,
                "group": pl.Int32,
            }
        )
        rows = pl.concat([empty, *self.parts])
        self.parts.clear()
        return rows


def missed_blocks(prompts: Prompts, stretches: pl.DataFrame) -> pl.DataFrame:
    """The blocks that lookups in the window missed and whose content another request has, too.

    They are sorted by time. Blocks that end their prompt (``last token``) and all other missed
    blocks (``compulsory``) are left out: ``Prompts.asked`` says how many there are.

    Columns: ``lookup`` (as in ``Prompts.asked``), ``timestamp_sec`` (of the lookup), ``index`` (of
    the block in its prompt), ``key`` (of its content), ``stretch`` (the key of its stretch),
    ``first`` (it is the first block that this lookup missed). Two more columns are about
    the requests with this content that were admitted before, on the same engine: ``computing``,
    the number of one that was still computing it, and ``made_sec``, since when it had been
    computed if none was.

    Args:
        prompts: of the session, with their contents.
        stretches: what ``analysis.prefix.stretches.in_common`` returns.

    """
    asked = prompts.asked.filter("in_window").drop_nulls("request")
    lookups = asked.select(
        "order",
        "lookup",
        "timestamp_sec",
        "first_missed",
        beyond=pl.col("full_blocks") - pl.col("ends_prompt").cast(pl.Int64),
    )
    begin = pl.max_horizontal("index", "first_missed")
    end = pl.min_horizontal(pl.col("index") + pl.col("blocks"), "beyond")
    return (
        _with_makers(_makers(stretches, prompts.stints))
        .lazy()
        .filter("in_prompt")
        .join(lookups.lazy(), on="order")
        .filter(begin < end)
        .select(
            "lookup",
            "timestamp_sec",
            "first_missed",
            index=pl.int_ranges(begin, end, dtype=pl.UInt32),
            row=pl.col("at") - pl.col("index"),
            stretch="key",
            computing=pl.when(pl.col("latest_sec") > pl.col("timestamp_sec")).then("computing"),
            made_sec=pl.when(pl.col("made_sec") > _NEVER).then("made_sec"),
        )
        .explode("index", empty_as_null=False)
        .with_columns(row=pl.col("row") + pl.col("index"))
        .select(
            "lookup",
            "timestamp_sec",
            "index",
            "stretch",
            "computing",
            "made_sec",
            key=pl.lit(prompts.contents["key"]).gather("row"),
            first=pl.col("index") == pl.col("first_missed"),
        )
        .sort("timestamp_sec")
        .collect()
    )


_NEVER = -1.0


def _makers(stretches: pl.DataFrame, stints: pl.DataFrame) -> pl.DataFrame:
    """A row for each stretch in each stint of the requests that have it.

    ``computing_sec``: until when that stint was computing the stretch. ``made_sec``: since when it
    was computed, null where that stint did not get so far.
    """
    first_token = pl.col("first_token_sec")
    in_prefill = first_token.is_between("begin_sec", "end_sec") & pl.col("in_prompt")
    return stretches.join(stints, on="request").select(
        *("key", "order", "request", "index", "blocks", "at", "in_prompt"),
        computing_sec=pl.when(in_prefill).then(first_token).otherwise("end_sec"),
        made_sec=pl.when("made").then(
            pl.when(in_prefill).then(first_token).when("last").then("end_sec")
        ),
    )


def _with_makers(makers: pl.DataFrame) -> pl.DataFrame:
    """The rows with what the stints before them did with the same stretch.

    ``latest_sec``: until when the last of them was computing it; ``computing``: the request of
    that one; ``made_sec``: when it was last computed.
    """
    before = pl.col("key") == pl.col("key").shift(1)
    return (
        makers.sort("key", "order")
        .with_columns(latest_sec=pl.col("computing_sec").cum_max().over("key"))
        .with_columns(
            computing=pl.when(pl.col("computing_sec") == pl.col("latest_sec"))
            .then("request")
            .forward_fill(),
            made_sec=pl.col("made_sec").fill_null(_NEVER).cum_max().over("key"),
        )
        .with_columns(pl.when(before).then(pl.col("latest_sec", "computing", "made_sec").shift(1)))
    )


def content_ids(blocks: pl.DataFrame) -> pl.Series:
    """The different content ids of these blocks. Their evictions decide why they were missed.

    Args:
        blocks: what ``missed_blocks`` returns.

    """
    ids: pl.Series = blocks["key"] // ENGINES
    return ids.unique()


def classify(
    blocks: pl.DataFrame,
    prompts: Prompts,
    stretches: pl.DataFrame,
    evicted: pl.DataFrame,
    *,
    group: int = 0,
    drops_hit_block: bool = False,
) -> pl.DataFrame:
    """The missed blocks with their ``reason``.

    The columns of ``blocks``, and more by reason; they are null for the other reasons. For
    ``capacity``, ``reset`` and ``explicit``: ``evicted_sec``, ``eviction`` (row number) and
    ``evicting_request`` of the eviction that lost the content. For ``not yet cached``:
    ``computing``, the number of the request that was computing it. For ``other rank``: ``rank``,
    the lowest that had it. For ``held back``: ``lacking_group``, where an eviction shows it.

    Args:
        blocks: what ``missed_blocks`` returns.
        prompts: of the same session.
        stretches: what ``analysis.prefix.stretches.in_common`` returns.
        evicted: what ``LossTally.result`` returns for ``content_ids(blocks)``.
        group: the KV cache group that the reasons hold for.
        drops_hit_block: speculative decoding gives the last block of a hit up again.

    """
    known = _with_loss(blocks, _of_group(evicted, group))
    dropped = pl.lit(drops_hit_block) & pl.col("first") & (pl.col("index") > 0)
    cached = pl.when("first").then(_said("held back")).otherwise(_said("behind"))
    reason = (
        pl.when(dropped)
        .then(_said("speculation"))
        .when(pl.col("computing").is_not_null())
        .then(_said("not yet cached"))
        .when(pl.col("evicted_sec").is_not_null())
        .then(pl.col("on_purpose").cast(pl.String).fill_null("capacity").cast(REASON))
        .when(pl.col("made_sec").is_not_null())
        .then(cached)
        .when(pl.col("rank").is_not_null())
        .then(_said("other rank"))
        .otherwise(_said("compulsory"))
    )
    ranked = _with(known, _other_ranks(known, prompts, stretches, evicted, group))
    return _with(ranked, _lacking_groups(known, evicted, group)).with_columns(reason=reason)


def _said(reason: str) -> pl.Expr:
    return pl.lit(reason, REASON)


def _with(blocks: pl.DataFrame, found: pl.DataFrame) -> pl.DataFrame:
    """The blocks with what was found out about some of them, by ``lookup`` and ``index``."""
    place = ["lookup", "index"]
    if found.is_empty():
        # One engine, one KV cache group: the usual case.
        return blocks.with_columns(
            pl.lit(None, kind).alias(name)
            for name, kind in found.schema.items()
            if name not in place
        )
    return blocks.join(found, on=place, how="left")


def _of_group(evicted: pl.DataFrame, group: int) -> pl.DataFrame:
    # Usually all are, and then millions of rows need no copy.
    is_of_group = evicted["group"] == group
    return evicted if is_of_group.all() else evicted.filter(is_of_group)


def _with_loss(blocks: pl.DataFrame, evicted: pl.DataFrame) -> pl.DataFrame:
    """The blocks with the eviction of their content since it was last computed, if there is one."""
    lost = evicted.select("key", "evicted_sec", "eviction", "on_purpose", "evicting_request").sort(
        "evicted_sec"
    )
    since = pl.col("made_sec").is_null() | (pl.col("evicted_sec") >= pl.col("made_sec"))
    return (
        blocks.sort("timestamp_sec")
        .join_asof(
            lost,
            left_on="timestamp_sec",
            right_on="evicted_sec",
            by="key",
            # The request itself evicts after its lookup.
            allow_exact_matches=False,
            check_sortedness=False,
        )
        .with_columns(
            pl.when(since).then(pl.col(name)).alias(name)
            for name in ("evicted_sec", "eviction", "on_purpose", "evicting_request")
        )
    )


def _other_ranks(
    blocks: pl.DataFrame,
    prompts: Prompts,
    stretches: pl.DataFrame,
    evicted: pl.DataFrame,
    group: int,
) -> pl.DataFrame:
    """For blocks that their own engine never had, the lowest rank whose cache had the content."""
    found = [pl.DataFrame(schema={"lookup": pl.UInt32, "index": pl.UInt32, "rank": pl.Int64})]
    ranks = prompts.asked["engine"].unique().sort().to_list()
    if len(ranks) > 1:
        makers = _makers(stretches, prompts.stints)
        made = makers.select("made_sec", stretch="key").drop_nulls().sort("made_sec")
        lacking = blocks.filter(pl.col("made_sec").is_null()).drop("made_sec")
        for rank in ranks:
            there = (
                lacking.filter(pl.col("key") % ENGINES != rank)
                .select(
                    "lookup",
                    "index",
                    "timestamp_sec",
                    key=pl.col("key") // ENGINES * ENGINES + rank,
                    stretch=pl.col("stretch") // ENGINES * ENGINES + rank,
                )
                .join_asof(
                    made,
                    left_on="timestamp_sec",
                    right_on="made_sec",
                    by="stretch",
                    check_sortedness=False,
                )
                .drop_nulls("made_sec")
            )
            left = _with_loss(there, evicted.filter(pl.col("group") == group))
            found.append(
                left.filter(pl.col("evicted_sec").is_null()).select(
                    "lookup", "index", rank=pl.lit(rank, pl.Int64)
                )
            )
    return pl.concat(found).unique(["lookup", "index"], keep="first", maintain_order=True)


def _lacking_groups(blocks: pl.DataFrame, evicted: pl.DataFrame, group: int) -> pl.DataFrame:
    """For cached blocks, another group that had lost the content since it was computed."""
    others = (
        evicted.filter(pl.col("group") != group)
        .select("key", lost_sec="evicted_sec", lacking_group="group")
        .sort("lost_sec")
    )
    return (
        blocks.filter(pl.col("made_sec").is_not_null() & pl.col("evicted_sec").is_null())
        .select("lookup", "index", "key", "timestamp_sec", "made_sec")
        .join_asof(
            others, left_on="timestamp_sec", right_on="lost_sec", by="key", check_sortedness=False
        )
        .filter(pl.col("lost_sec") >= pl.col("made_sec"))
        .select("lookup", "index", "lacking_group")
    )
