# SPDX-License-Identifier: Apache-2.0
"""Which request evicted contents that others then had to compute again?

``analysis.prefix.misses`` names the eviction for each block that a lookup missed because of one,
and the eviction names the request that needed the room: its *evictor*. So every recomputed token
has one evictor. What resets and evictions on request lost is no request's doing, and not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.prefix.prompts import ENGINES, Prompts

SHOWN = 10
"""How many evictors, and how many contents, are named."""

_NAME = ["engine", "evicting_request"]


@dataclass(frozen=True)
class Evictor:
    """A request that evicted contents which ``requests`` others asked for later.

    ``recomputed_tokens``: tokens that these had to compute again, ``after_p50_sec`` after the
    eviction (median over the blocks). ``evicted_blocks``: all that it evicted;
    ``regretted_blocks``: those whose content was asked for again. ``input_tokens``: the length of
    its prompt. ``one_off``: whether no later request asked for a block that it computed. The last
    two are None where it had not ended. ``request_id`` is None where the session does not name it.
    """

    request_id: str | None
    engine: int
    recomputed_tokens: int
    requests: int
    after_p50_sec: float | None
    regretted_blocks: int
    evicted_blocks: int
    input_tokens: int | None
    one_off: bool | None


@dataclass(frozen=True)
class Sweepers:
    """The one-off requests that evicted what others asked for later.

    No request asked for anything that they computed: they swept the cache and left nothing of use
    in it. ``evicted_blocks`` and ``evicted_tokens``: all that they evicted. ``regretted_blocks``:
    those whose content was asked for later. ``recomputed_tokens``: tokens computed again because
    of that; ``share``: of all that were computed again because of evictions, from 0 to 1.
    ``proven_blocks``: regretted blocks whose content two or more requests had used before, so that
    a policy which counts uses would have had a reason to keep them.
    """

    requests: int
    evicted_blocks: int
    evicted_tokens: int
    regretted_blocks: int
    recomputed_tokens: int
    share: float | None
    proven_blocks: int


@dataclass(frozen=True)
class Content:
    """``blocks`` of a prompt that were evicted and then missed by the same ``misses`` lookups.

    They hold the tokens from ``begin_token`` to ``end_token``. ``content_id``: of the last of
    them; it stands for the whole prompt up to there. ``evictions``: how often one of these blocks
    was evicted. ``recomputed_tokens``: tokens that the lookups' requests computed again.
    """

    content_id: int
    engine: int
    begin_token: int
    end_token: int
    blocks: int
    evictions: int
    misses: int
    recomputed_tokens: int


@dataclass(frozen=True)
class Blame:
    """``recomputed_tokens``: all tokens that were computed again because of evictions for room.

    ``evictors``: how many requests evicted these; ``worst``: the costliest of them, the worst
    first. ``sweepers``: the one-off ones among them. ``contents``: the contents that cost most.
    """

    recomputed_tokens: int
    evictors: int
    worst: tuple[Evictor, ...]
    sweepers: Sweepers
    contents: tuple[Content, ...]


def measure(
    missed: pl.DataFrame,
    prompts: Prompts,
    uses: pl.DataFrame,
    asked_again: pl.DataFrame,
    evicted: pl.DataFrame,
) -> Blame:
    """Who evicted what was needed, and what that cost.

    Args:
        missed: what ``analysis.pool.evictions.for_room`` returns.
        prompts: of the session.
        uses: what ``analysis.prefix.reuse.uses`` returns.
        asked_again: what ``analysis.prefix.reuse.asked_again`` returns.
        evicted: what ``analysis.pool.evictions.EvictionTally.by_evictor`` returns.

    """
    evictors = _evictors(missed, prompts, asked_again, evicted)
    return Blame(
        recomputed_tokens=int(missed["block_size"].sum()),
        evictors=int(evictors["evicting_request"].is_not_null().sum()),
        worst=tuple(
            Evictor(**row)
            for row in evictors.head(SHOWN)
            .select(
                "engine",
                "recomputed_tokens",
                "requests",
                "after_p50_sec",
                "regretted_blocks",
                "evicted_blocks",
                "input_tokens",
                "one_off",
                request_id="evicting_request",
            )
            .iter_rows(named=True)
        ),
        sweepers=_sweepers(missed, uses, evictors),
        contents=_contents(missed),
    )


def _evictors(
    missed: pl.DataFrame, prompts: Prompts, asked_again: pl.DataFrame, evicted: pl.DataFrame
) -> pl.DataFrame:
    """One row for each evictor, the costliest first."""
    late = (pl.col("timestamp_sec") - pl.col("evicted_sec")).sort()
    evictors = (
        missed.group_by(_NAME)
        .agg(
            pl.col("block_size").sum().alias("recomputed_tokens"),
            requests=pl.col("lookup").n_unique(),
            after_p50_sec=late.quantile(0.5, interpolation="linear"),
            regretted_blocks=pl.col("eviction").n_unique(),
            block_size=pl.col("block_size").max(),
        )
        .cast({"evicting_request": pl.String})
    )
    # A client may use a request id again. Its requests count as one, and the last one names it.
    known = (
        prompts.asked.drop_nulls("request")
        .unique(["engine", "request_id"], keep="last", maintain_order=True)
        .select("engine", "request", evicting_request="request_id", input_tokens="query_tokens")
    )
    useful = asked_again.filter(pl.col("asked") > 0).select("request")
    return (
        evictors.join(known, on=_NAME, how="left")
        .join(useful.with_columns(one_off=pl.lit(value=False)), on="request", how="left")
        .join(evicted.rename({"blocks": "evicted_blocks"}), on=_NAME, how="left", nulls_equal=True)
        .with_columns(
            one_off=pl.when(pl.col("request").is_not_null()).then(pl.col("one_off").is_null()),
            evicted_blocks=pl.max_horizontal("evicted_blocks", "regretted_blocks"),
        )
        .sort("recomputed_tokens", *_NAME, descending=[True, False, False])
    )


def _sweepers(missed: pl.DataFrame, uses: pl.DataFrame, evictors: pl.DataFrame) -> Sweepers:
    sweepers = evictors.filter(pl.col("one_off").fill_null(value=False))
    names = sweepers.select(_NAME).cast({"evicting_request": pl.Categorical})
    swept = missed.join(names, on=_NAME, how="semi")
    lost = swept.unique("eviction").sort("evicted_sec")
    used = uses.select(
        "begin_sec", stretch="key", before=pl.col("begin_sec").cum_count().over("key")
    )
    proven = lost.join_asof(
        used.sort("begin_sec"),
        left_on="evicted_sec",
        right_on="begin_sec",
        by="stretch",
        check_sortedness=False,
    )
    recomputed, every = int(swept["block_size"].sum()), int(missed["block_size"].sum())
    return Sweepers(
        requests=sweepers.height,
        evicted_blocks=int(sweepers["evicted_blocks"].sum()),
        evicted_tokens=int((sweepers["evicted_blocks"] * sweepers["block_size"]).sum()),
        regretted_blocks=lost.height,
        recomputed_tokens=recomputed,
        share=recomputed / every if every else None,
        proven_blocks=int((proven["before"] >= 2).sum()),
    )


def _contents(missed: pl.DataFrame) -> tuple[Content, ...]:
    size = pl.col("block_size")
    blocks = missed.group_by("key").agg(
        size.first(),
        pl.col("index").first().cast(pl.Int64),
        evictions=pl.col("eviction").n_unique(),
        misses=pl.len(),
        recomputed_tokens=size.sum(),
        first=pl.col("lookup").min(),
        same=pl.col("lookup").hash().sum(),
    )
    # Blocks that the same lookups missed belong to the same prefix.
    rows = (
        blocks.sort("index")
        .group_by("first", "misses", "same", maintain_order=True)
        .agg(
            pl.col("key").last(),
            (pl.col("index") * size).min().alias("begin_token"),
            ((pl.col("index") + 1) * size).max().alias("end_token"),
            pl.len().alias("blocks"),
            pl.col("evictions", "recomputed_tokens").sum(),
        )
        .sort("recomputed_tokens", "first", "begin_token", descending=[True, False, False])
        .head(SHOWN)
        .select(
            "begin_token",
            "end_token",
            "blocks",
            "evictions",
            "misses",
            "recomputed_tokens",
            content_id=pl.col("key") // ENGINES,
            engine=pl.col("key") % ENGINES,
        )
    )
    return tuple(Content(**row) for row in rows.iter_rows(named=True))
