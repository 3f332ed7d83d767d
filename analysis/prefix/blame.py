# SPDX-License-Identifier: Apache-2.0
"""Which request's blocks took the place of what others then had to compute again?

The chain is evictor, evicted content, later miss. It is told by ``analysis.prefix.misses``: a block
that was missed because its content had been evicted names the eviction, and that names the request
which needed the room. So every recomputed token has one evictor.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.prefix.prompts import ENGINES, Prompts

SHOWN = 10
"""How many evictors and contents are named."""

_NAME = ["engine", "evicting_request"]


@dataclass(frozen=True)
class Evictor:
    """A request that evicted what ``requests`` others asked for later.

    ``recomputed_tokens``: that they had to compute again because of it, ``after_p50_sec`` after
    the eviction (the median over their blocks). ``evicted_blocks``: all that it evicted;
    ``regretted_blocks``: those of them that were asked for. ``input_tokens``: of its prompt.
    ``one_off``: no later request asked for any block that it computed; both are None where it had
    not ended. ``request_id`` is None for evictions by a reset, or at somebody's explicit wish.
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
    """The one-off requests that evicted what others asked for later: nobody asked for anything
    that they computed, so they swept the cache and left nothing of use in it.

    ``evicted_blocks`` and ``evicted_tokens``: all that they evicted. ``regretted_blocks``: what
    of it was asked for later; ``recomputed_tokens``: the cost, and ``share`` of all tokens that
    were computed again because of evictions, from 0 to 1. ``proven_blocks``: of the regretted
    ones those whose content two or more requests had used before, so that a policy which counts
    uses would have had a reason to keep it.
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
    """``blocks`` of a prompt, which lie from ``begin_token`` to ``end_token`` in it, were evicted,
    and the same ``misses`` lookups asked for each of them later.

    ``content_id``: of the last of them, which stands for the prompt up to there. ``evictions``:
    of these blocks, each as often as it was evicted. ``recomputed_tokens``: computed again.
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
    """``recomputed_tokens``: all that were computed again because of evictions. ``evictors``:
    how many requests evicted them; ``worst``: the first of those, the costliest first.
    ``contents``: the costliest ones.
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
    returns: pl.DataFrame,
    evicted: pl.DataFrame,
) -> Blame:
    """Who is to blame.

    Args:
        missed: blocks, as ``analysis.pool.evictions.missed_for_capacity`` found them.
        prompts: of the session.
        uses: what ``analysis.prefix.reuse.shared`` found.
        returns: what ``analysis.prefix.reuse.returns`` made of them.
        evicted: how many ``blocks`` each ``engine`` and ``evicting_request`` evicted.

    """
    evictors = _evictors(missed, prompts, returns, evicted)
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
    missed: pl.DataFrame, prompts: Prompts, returns: pl.DataFrame, evicted: pl.DataFrame
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
    # A client that uses a request id again: its requests are told as one, by the last of them.
    known = (
        prompts.asked.drop_nulls("request")
        .unique(["engine", "request_id"], keep="last", maintain_order=True)
        .select("engine", "request", evicting_request="request_id", input_tokens="query_tokens")
    )
    useful = returns.filter(pl.col("asked") > 0).select("request")
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
    used = uses.select("begin_sec", piece="key", before=pl.col("begin_sec").cum_count().over("key"))
    proven = lost.join_asof(
        used.sort("begin_sec"),
        left_on="evicted_sec",
        right_on="begin_sec",
        by="piece",
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
    # Blocks that the same lookups missed belong to one prefix of their prompts.
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
