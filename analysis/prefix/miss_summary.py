# SPDX-License-Identifier: Apache-2.0
"""How much of the prompts did lookups miss for which reason, and what would have found it?

``misses`` gives each missed block its reason; this module sums them up. Each token of an admitted
request's prompt was found, or missed for a reason, or lies in a last block that is not full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import polars as pl

from analysis.pool.evictions import ON_PURPOSE
from analysis.pool.usable import block_size_of
from analysis.pool.usage import Usage
from analysis.prefix.prompts import ENGINES, Prompts
from analysis.stats.quantiles import of_sample
from analysis.tables.facts import Facts

COLUMNS = ("timestamp_sec", "event", "num_blocks", "engine")

BLOCK_COLUMNS = (
    "lookup",
    "index",
    "key",
    "timestamp_sec",
    "reason",
    "evicted_sec",
    "evicting_request",
    "lacking_group",
)
"""The columns of ``analysis.prefix.misses.classify`` that ``measure`` needs."""

SHOWN = 5
"""How many of the costliest requests are named."""

_NEVER_CACHED = ("compulsory", "last token", "unknown")
"""Reasons of blocks that no cache of this engine could have found, whatever its size. The losses
``ON_PURPOSE`` are others, with all that follows them in their prompt."""


@dataclass(frozen=True)
class Missed:
    """Full blocks that lookups missed for one reason, their tokens, and the requests that missed
    any of them."""

    blocks: int
    tokens: int
    requests: int


@dataclass(frozen=True)
class Short:
    """What it would have taken to find the blocks that had been evicted.

    ``late_p50_sec``, ``late_p95_sec``: seconds from a block's eviction to the lookup that missed
    it. ``blocks``: missed blocks that stood behind no block missed for another reason.
    ``more_blocks_p50``, ``_p90`` and ``_max``: the quantiles, over these, of the blocks by which
    the pool was too small, at most. For one block this is the number of blocks allocated from its
    eviction to the lookup, as each block more in the pool puts the eviction off by one allocation;
    but no more than would hold every content of the session beside what requests held at the peak.
    ``bounded``: blocks for which the latter was less.
    """

    late_p50_sec: float | None
    late_p95_sec: float | None
    blocks: int
    more_blocks_p50: int | None
    more_blocks_p90: int | None
    more_blocks_max: int | None
    bounded: int


@dataclass(frozen=True)
class Costly:
    """A request that had to compute ``tokens`` again because their blocks had been evicted.

    It was looked up at ``timestamp_sec``. ``evicted_by``: the request that evicted the first of
    these blocks, ``late_sec`` before the lookup. ``more_blocks``: with so many blocks more, at
    most, the pool would have kept them all; None where other reasons stood in the way.
    """

    request_id: str
    engine: int
    timestamp_sec: float
    tokens: int
    evicted_by: str | None
    late_sec: float
    more_blocks: int | None


@dataclass(frozen=True)
class MissReasons:
    """The prompts of the admitted requests, each counted once, by the lookup that admitted it.

    ``by_reason``: the reasons of ``misses`` that occurred, those with most tokens first.
    ``held_back_by``: blocks by the KV cache group that lacked them, as far as evictions show it.
    ``unknown_requests``: requests that had not ended, so that their contents are not known; all
    their missed blocks are ``unknown``. ``partial_tokens``: tokens in last blocks that are not
    full. ``recomputed_tokens``: tokens computed again because of evictions for room;
    ``recomputed_share``: of all prompt tokens that had to be computed, from 0 to 1. ``ceiling``:
    the highest hit rate of tokens that these requests could have reached on these engines, with
    pools that never evict for room, and with the same resets and evictions on request.
    ``short``: what it would have taken. ``costliest``: the requests that computed most again.
    """

    requests: int
    unknown_requests: int
    query_tokens: int
    hit_tokens: int
    by_reason: Mapping[str, Missed]
    held_back_by: Mapping[int, int]
    partial_tokens: int
    recomputed_tokens: int
    recomputed_share: float | None
    ceiling: float | None
    short: Short
    costliest: tuple[Costly, ...]


@dataclass
class HandedOutTally:
    """Keeps when each engine allocated how many blocks."""

    parts: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        self.parts.append(
            batch.lazy()
            .filter(pl.col("event") == "allocate")
            .select(pl.col("engine", "num_blocks").cast(pl.Int32), "timestamp_sec")
            .collect()
        )

    def result(self) -> pl.DataFrame:
        """A row for each allocation, by time. The tally is empty afterwards.

        Columns: ``engine``, ``timestamp_sec``, ``handed_out`` (blocks that the engine had allocated
        by then, this allocation included).
        """
        schema = {"engine": pl.Int32, "num_blocks": pl.Int32, "timestamp_sec": pl.Float64}
        rows = pl.concat([pl.DataFrame(schema=schema), *self.parts])
        self.parts.clear()
        return rows.sort("timestamp_sec", maintain_order=True).select(
            "engine",
            "timestamp_sec",
            handed_out=pl.col("num_blocks").cast(pl.Int64).cum_sum().over("engine"),
        )


def useful_blocks(
    facts: Facts, usage: Usage, prompts: Prompts, contents: Mapping[int, int]
) -> dict[int, int]:
    """By engine, the blocks by which a pool would have to be larger to hold all that it ever had.

    That is every content of the session, and room for what requests held at the peak. It is empty
    for several KV cache groups, and where requests have not ended. It leaves engines out whose
    pool is large enough.

    Args:
        facts: of the session.
        usage: of its pools.
        prompts: of the session.
        contents: how many different contents each engine computed.

    """
    if block_size_of(facts, usage) is None or prompts.asked["request"].null_count():
        return {}
    every = {
        pool.engine: contents.get(pool.engine, 0) + pool.peak.held_blocks - pool.end.total_blocks
        for pool in usage.pools
        if pool.engine is not None
    }
    # Where they would all fit, blocks were evicted for another reason than room.
    return {engine: blocks for engine, blocks in every.items() if blocks > 0}


def measure(
    prompts: Prompts,
    blocks: pl.DataFrame,
    handed_out: pl.DataFrame,
    useful: Mapping[int, int] | None = None,
) -> MissReasons:
    """Sum up the session's missed blocks.

    Args:
        prompts: the session's prompts.
        blocks: what ``analysis.prefix.misses.classify`` returns, at least ``BLOCK_COLUMNS``.
        handed_out: what ``HandedOutTally.result`` returns.
        useful: what ``useful_blocks`` returns.

    """
    asked = prompts.asked.filter("in_window").with_columns(
        found=pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0)
    )
    unknown = asked.filter(pl.col("request").is_null())
    known = asked.drop_nulls("request")
    query, found = int(asked["query_tokens"].sum()), int(asked["found"].sum())
    reasons = _by_reason(known, blocks, int((unknown["query_tokens"] - unknown["found"]).sum()))
    if unknown.height:
        reasons["unknown"] = replace(reasons["unknown"], requests=unknown.height)
    partial = int(known.select((pl.col("query_tokens") % pl.col("block_size")).sum()).item())
    lost = with_shortfall(blocks, handed_out, useful or {}).join(
        known.select("lookup", "block_size"), on="lookup"
    )
    recomputed = int(lost["block_size"].sum())
    beyond = sum(reasons[name].tokens for name in _NEVER_CACHED if name in reasons) + partial
    beyond += _lost_on_purpose(blocks, known)
    held_back = blocks.filter(pl.col("reason") == "held back").drop_nulls("lacking_group")
    return MissReasons(
        requests=asked.height,
        unknown_requests=unknown.height,
        query_tokens=query,
        hit_tokens=found,
        by_reason=dict(sorted(reasons.items(), key=lambda item: (-item[1].tokens, item[0]))),
        held_back_by=dict(
            held_back.group_by("lacking_group").len().sort("lacking_group").iter_rows()
        ),
        partial_tokens=partial,
        recomputed_tokens=recomputed,
        recomputed_share=recomputed / (query - found) if query > found else None,
        ceiling=(query - beyond) / query if query else None,
        short=_short(lost),
        costliest=_costliest(lost, known),
    )


def _by_reason(known: pl.DataFrame, blocks: pl.DataFrame, unknown_tokens: int) -> dict[str, Missed]:
    """The blocks by reason, those included that ``misses`` leaves out."""
    counted = (
        by_lookup(known, blocks)
        .group_by("reason")
        .agg(
            pl.col("blocks").sum().cast(pl.Int64),
            tokens=(pl.col("blocks") * pl.col("block_size")).sum(),
            requests=pl.col("lookup").n_unique(),
        )
    )
    found = {reason: Missed(*numbers) for reason, *numbers in counted.iter_rows()}
    return {**found, "unknown": Missed(0, unknown_tokens, 0)} if unknown_tokens else found


def by_lookup(known: pl.DataFrame, blocks: pl.DataFrame) -> pl.DataFrame:
    """How many full blocks each lookup missed for which reason.

    Columns: ``lookup``, ``block_size`` (tokens), ``reason``, ``blocks``.

    Args:
        known: rows of ``Prompts.asked`` whose contents are known.
        blocks: what ``analysis.prefix.misses.classify`` returns.

    """
    sizes = known.select("lookup", "block_size")
    counted = blocks.group_by("lookup", "reason").len("blocks").join(sizes, on="lookup")
    missed = (pl.col("full_blocks") - pl.col("first_missed")).clip(0)
    last = (pl.col("ends_prompt") & (missed > 0)).cast(pl.Int64)
    explained = counted.group_by("lookup").agg(explained=pl.col("blocks").sum().cast(pl.Int64))
    others = known.join(explained, on="lookup", how="left").select(
        "lookup", "block_size", last=last, new=missed - last - pl.col("explained").fill_null(0)
    )
    return pl.concat(
        [
            counted.select("lookup", "block_size", pl.col("reason").cast(pl.String), "blocks"),
            *(
                others.select("lookup", "block_size", reason=pl.lit(reason), blocks=name)
                .filter(pl.col("blocks") > 0)
                .cast({"blocks": pl.UInt32})
                for reason, name in (("last token", "last"), ("compulsory", "new"))
            ),
        ]
    )


def _lost_on_purpose(blocks: pl.DataFrame, known: pl.DataFrame) -> int:
    """The tokens of blocks lost on purpose, and of those behind them in their prompts."""
    lost = blocks.filter(pl.col("reason").is_in(ON_PURPOSE))
    if lost.is_empty():
        return 0
    return int(
        blocks.filter(~pl.col("reason").is_in(_NEVER_CACHED))
        .join(lost.group_by("lookup").agg(first=pl.col("index").min()), on="lookup")
        .filter(pl.col("index") >= pl.col("first"))
        .join(known.select("lookup", "block_size"), on="lookup")["block_size"]
        .sum()
    )


def with_shortfall(
    blocks: pl.DataFrame, handed_out: pl.DataFrame, useful: Mapping[int, int] | None = None
) -> pl.DataFrame:
    """The missed blocks that had been evicted for room, by ``lookup`` and ``index``.

    Columns: ``lookup``, ``index``, ``timestamp_sec`` (of the lookup), ``evicted_sec``,
    ``evicting_request``, ``engine``; ``since`` (blocks allocated from the eviction to the lookup),
    ``first_other`` (the first block of the prompt that was missed for another reason),
    ``late_sec`` (seconds from the eviction to the lookup), ``more_blocks``, and whether these are
    ``bounded`` by what is useful.

    ``more_blocks`` would have kept this block and those before it in its prompt: with n blocks
    more in the pool, vLLM's queue of free blocks gives each block out n allocations later. It is
    null where a block before it was missed for another reason.

    Args:
        blocks: what ``analysis.prefix.misses.classify`` returns.
        handed_out: what ``HandedOutTally.result`` returns.
        useful: what ``useful_blocks`` returns.

    """
    evicted = pl.col("reason") == "capacity"
    other = blocks.filter(~evicted).group_by("lookup").agg(first_other=pl.col("index").min())
    lost = blocks.filter(evicted).select(
        "lookup",
        "index",
        "timestamp_sec",
        "evicted_sec",
        "evicting_request",
        engine=(pl.col("key") % ENGINES).cast(pl.Int32),
    )

    def up_to(moment: str, *, inclusive: bool) -> pl.Series:
        """Blocks that the engine of each missed block had allocated by this moment of its own."""
        moments = lost.select("engine", timestamp_sec=moment).with_row_index("row")
        # Engine by engine: such a join is several times slower with a key.
        parts = [
            part.sort("timestamp_sec").join_asof(
                handed_out.filter(pl.col("engine") == engine).drop("engine"),
                on="timestamp_sec",
                allow_exact_matches=inclusive,
                check_sortedness=False,
            )
            for (engine,), part in moments.group_by("engine")
        ]
        if not parts:
            return pl.Series("handed_out", [], pl.Int64)
        return pl.concat(parts).sort("row")["handed_out"].fill_null(0)

    since = up_to("timestamp_sec", inclusive=True) - up_to("evicted_sec", inclusive=False)
    reachable = pl.col("first_other").is_null() | (pl.col("index") < pl.col("first_other"))
    most = pl.col("engine").replace_strict(useful or {}, default=None, return_dtype=pl.Int64)
    return (
        lost.with_columns(since=since)
        .join(other, on="lookup", how="left")
        .sort("lookup", "index")
        .with_columns(
            late_sec=pl.col("timestamp_sec") - pl.col("evicted_sec"),
            more_blocks=pl.when(reachable).then(pl.col("since").cum_max().over("lookup")),
        )
        .with_columns(bounded=(pl.col("more_blocks") > most).fill_null(value=False))
        .with_columns(more_blocks=pl.when("bounded").then(most).otherwise("more_blocks"))
    )


def _short(lost: pl.DataFrame) -> Short:
    late = lost["late_sec"].sort()
    more = lost["more_blocks"].drop_nulls().sort()

    def blocks(percent: int) -> int | None:
        value = of_sample(more, percent)
        return None if value is None else round(value)

    return Short(
        late_p50_sec=of_sample(late, 50),
        late_p95_sec=of_sample(late, 95),
        blocks=more.len(),
        more_blocks_p50=blocks(50),
        more_blocks_p90=blocks(90),
        more_blocks_max=blocks(100),
        bounded=int(lost["bounded"].sum()),
    )


def _costliest(lost: pl.DataFrame, asked: pl.DataFrame) -> tuple[Costly, ...]:
    most = (
        lost.group_by("lookup")
        .agg(
            pl.col("block_size").sum().alias("tokens"),
            pl.col("evicting_request").sort_by("index").first(),
            pl.col("late_sec").sort_by("index").first(),
            more_blocks=pl.when(pl.col("more_blocks").is_null().any())
            .then(None)
            .otherwise(pl.col("more_blocks").max()),
        )
        .sort("tokens", "lookup", descending=[True, False])
        .head(SHOWN)
        .join(asked.select("lookup", "request_id", "engine", "timestamp_sec"), on="lookup")
        .sort("tokens", "lookup", descending=[True, False])
    )
    return tuple(
        Costly(**row)
        for row in most.select(
            "request_id",
            "engine",
            "timestamp_sec",
            "tokens",
            "late_sec",
            "more_blocks",
            evicted_by="evicting_request",
        ).iter_rows(named=True)
    )
