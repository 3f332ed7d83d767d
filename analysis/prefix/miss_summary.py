# SPDX-License-Identifier: Apache-2.0
"""How much of the prompts was not found for which reason, and what would have found it?

``misses`` says the reason of each block; this sums them up. Every token of an admitted request's
prompt is found, or missed with a reason, or in the last block, which is not full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import polars as pl

from analysis.pool.capacity import block_size_of
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
"""Of what ``analysis.prefix.misses.classify`` says of the missed blocks."""

SHOWN = 5
"""How many of the costliest requests are named."""

_NEVER_CACHED = ("compulsory", "last token", "unknown")
"""What no cache of this engine could have found, of whatever size."""


@dataclass(frozen=True)
class Missed:
    """Full blocks that were missed for one reason, their tokens, and the requests that missed
    any of them."""

    blocks: int
    tokens: int
    requests: int


@dataclass(frozen=True)
class Short:
    """What the blocks that had been evicted would have taken.

    ``late_p50_sec``, ``late_p95_sec``: how long before the lookup the block had been evicted: so
    much earlier, it would have been found. ``blocks``: those that were missed for no other reason
    than evictions, in their prompt as far back as the hit; ``more_blocks_p50``, ``_p90`` and
    ``_max``: of these, by how many blocks the pool was too small, at most: the blocks that were
    handed out from the eviction to the lookup, each of which a larger pool puts off by one; and
    no more than would hold all contents that the session ever had, beside what requests held at
    the peak. ``bounded``: those for which that was less.
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
    """A request that had to compute ``tokens`` again because they had been evicted.

    ``evicted_by``: the request whose blocks took the place of the first of them, ``late_sec``
    before the lookup; ``more_blocks``: as many more would have kept them all, at most, None where
    other reasons were in the way.
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
    """Of the admitted requests' prompts, each request once, by the lookup that admitted it.

    ``by_reason``: by the reasons of ``misses``, those that occurred, most tokens first;
    ``held_back_by``: blocks by the KV cache group that had lost them, as far as evictions tell.
    ``unknown_requests``: requests that had not ended, so that their contents are not known; all
    their missed blocks are ``unknown``. ``partial_tokens``: in last blocks that are not full.
    ``recomputed_tokens``: computed again because of evictions; ``recomputed_share``: of all the
    prompt tokens that had to be computed, from 0 to 1. ``ceiling``: the hit rate of tokens that
    this workload could have reached on this engine at most, with a pool that never evicts.
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
    """How many blocks each engine had handed out by when, of the allocations seen so far."""

    parts: list[pl.DataFrame] = field(default_factory=list)

    def add(self, batch: pl.DataFrame) -> None:
        self.parts.append(
            batch.lazy()
            .filter(pl.col("event") == "allocate")
            .select(pl.col("engine", "num_blocks").cast(pl.Int32), "timestamp_sec")
            .collect()
        )

    def result(self) -> pl.DataFrame:
        """``engine``, ``timestamp_sec`` and the blocks ``handed_out`` up to then, by time."""
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
    """By engine, the blocks that would hold all that the session ever had, beyond what its pool
    has: all contents, and room for what requests held at the peak. Engines of which that is not
    known are left out: with several KV cache groups, or requests that have not ended.

    Args:
        facts: of the session.
        usage: of its pools.
        prompts: of the session.
        contents: how many different ones each engine computed.

    """
    if block_size_of(facts, usage) is None or prompts.asked["request"].null_count():
        return {}
    every = {
        pool.engine: contents.get(pool.engine, 0) + pool.peak.held_blocks - pool.end.total_blocks
        for pool in usage.pools
        if pool.engine is not None
    }
    # Where they would all fit, blocks were lost for other reasons than room.
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
        blocks: what ``analysis.prefix.misses.classify`` said of them, at least ``BLOCK_COLUMNS``.
        handed_out: what ``HandedOutTally`` counted.
        useful: what the function of this name found.

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
    """The blocks by reason, those included that need no history to tell."""
    size = pl.col("block_size")
    sizes = known.select("lookup", "block_size")
    by_lookup = blocks.group_by("lookup", "reason").len("blocks").join(sizes, on="lookup")
    missed = (pl.col("full_blocks") - pl.col("first_missed")).clip(0)
    last = (pl.col("ends_prompt") & (missed > 0)).cast(pl.Int64)
    told = by_lookup.group_by("lookup").agg(told=pl.col("blocks").sum().cast(pl.Int64))
    others = known.join(told, on="lookup", how="left").select(
        "lookup", "block_size", last=last, new=missed - last - pl.col("told").fill_null(0)
    )
    whole = pl.concat(
        [
            by_lookup.select("lookup", "block_size", pl.col("reason").cast(pl.String), "blocks"),
            *(
                others.select("lookup", "block_size", reason=pl.lit(reason), blocks=name)
                .filter(pl.col("blocks") > 0)
                .cast({"blocks": pl.UInt32})
                for reason, name in (("last token", "last"), ("compulsory", "new"))
            ),
        ]
    )
    counted = whole.group_by("reason").agg(
        pl.col("blocks").sum().cast(pl.Int64),
        tokens=(pl.col("blocks") * size).sum(),
        requests=pl.col("lookup").n_unique(),
    )
    found = {reason: Missed(*numbers) for reason, *numbers in counted.iter_rows()}
    return {**found, "unknown": Missed(0, unknown_tokens, 0)} if unknown_tokens else found


def with_shortfall(
    blocks: pl.DataFrame, handed_out: pl.DataFrame, useful: Mapping[int, int] | None = None
) -> pl.DataFrame:
    """The blocks that had been evicted, with ``late_sec`` and ``more_blocks``, and whether these
    are ``bounded`` by what is ``useful``.

    ``more_blocks`` is what would have kept this block and those before it in its prompt: with n
    blocks more in the pool, vLLM's queue of free blocks takes each block n handed-out blocks
    later. It is null where a block before it was missed for another reason.
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
        """Blocks handed out on each block's engine up to this moment of its own."""
        moments = lost.select("engine", timestamp_sec=moment).with_row_index("row")
        # Engine by engine: by a key such a join is several times slower.
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
