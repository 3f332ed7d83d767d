# SPDX-License-Identifier: Apache-2.0
"""How much of what the prefix cache found is one conversation going on, and how much is shared?

A block that a lookup found belongs to the request that computed its content first. It was found
*within* a conversation if that request is of the same conversation, and *across* conversations
otherwise.

A request continues the conversation of an earlier one under the conditions of
``analysis.whatif.ceiling``: its prompt is longer, it begins with all full blocks of the earlier
prompt, and the earlier request was the first to compute the last block that it shares with any
request before.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.prefix.prompts import Prompts


@dataclass(frozen=True)
class Conversations:
    """``conversations`` of the ``requests`` that were admitted and have ended, single requests
    included. ``turns``: those of the requests that continue an earlier one. ``hit_tokens``: that
    admitted requests found, those of a KV connector included. Of these, ``within_tokens`` were
    found in the same conversation and ``across_tokens`` across conversations; of
    ``unknown_tokens`` the first request is not known, as that or this one has not ended."""

    requests: int
    conversations: int
    turns: int
    hit_tokens: int
    within_tokens: int
    across_tokens: int
    unknown_tokens: int


def measure(prompts: Prompts, uses: pl.DataFrame) -> Conversations:
    """The conversations of the session's requests, without the warm-up.

    Args:
        prompts: of the session.
        uses: what ``analysis.prefix.reuse.uses`` returns.

    """
    asked = prompts.asked.filter("in_window")
    belongs = _conversations(prompts, uses)
    tokens = (
        _with_first(uses)
        .filter("asked", "found", pl.col("first") != pl.col("request"))
        .join(belongs, on="request")
        .join(belongs.rename({"request": "first", "belongs": "of_first"}), on="first")
        .join(_sizes(prompts), on="request")
        .select(
            within=pl.col("belongs") == pl.col("of_first"),
            tokens=pl.col("blocks") * pl.col("block_size"),
        )
    )
    within = int(tokens.filter("within")["tokens"].sum())
    across = int(tokens.filter(~pl.col("within"))["tokens"].sum())
    found = asked.select(pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0))
    hits = int(found.to_series().sum())
    known = asked.drop_nulls("request").join(belongs, on="request")
    return Conversations(
        requests=known.height,
        conversations=known["belongs"].n_unique(),
        turns=known.filter(pl.col("belongs") != pl.col("request")).height,
        hit_tokens=hits,
        within_tokens=within,
        across_tokens=across,
        unknown_tokens=max(0, hits - within - across),
    )


def _sizes(prompts: Prompts) -> pl.DataFrame:
    return prompts.asked.drop_nulls("request").select("request", "block_size")


def _with_first(uses: pl.DataFrame) -> pl.DataFrame:
    """The uses, each with the request that computed the stretch first, as ``first``."""
    return uses.with_columns(first=pl.col("request").first().over("key"))


def _conversations(prompts: Prompts, uses: pl.DataFrame) -> pl.DataFrame:
    """For each ``request`` whose contents are known, the first one of its conversation, as
    ``belongs``. The warm-up is part of it: a conversation may have begun there."""
    known = prompts.asked.drop_nulls("request").select(
        "request", "order", "query_tokens", "full_blocks"
    )
    last_shared = (
        _with_first(uses)
        .filter(pl.col("first") != pl.col("request"))
        .join(known.select("request", "full_blocks"), on="request")
        .filter(pl.col("index") < pl.col("full_blocks"))
        .group_by("request")
        .agg(
            shared=pl.col("blocks").sum(),
            before=pl.col("first").sort_by("index").last(),
        )
    )
    earlier = known.select(before="request", longer="query_tokens", whole="full_blocks")
    goes_on = (
        last_shared.join(earlier, on="before")
        .join(known.select("request", "query_tokens"), on="request")
        .filter(pl.col("shared") >= pl.col("whole"), pl.col("query_tokens") > pl.col("longer"))
        .select("request", "before")
    )
    rows = known.join(goes_on, on="request", how="left").sort("order")
    belongs: dict[int, int] = {}
    for request, before in rows.select("request", "before").iter_rows():
        belongs[request] = request if before is None else belongs.get(before, before)
    return pl.DataFrame(
        {"request": list(belongs), "belongs": list(belongs.values())},
        schema={"request": pl.UInt32, "belongs": pl.UInt32},
    )
