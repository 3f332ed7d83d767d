# SPDX-License-Identifier: Apache-2.0
"""What did each replica have to compute although another one had it?

Each engine of each session is a cache of its own. For every lookup that counts, the caches of all
others are looked at as they were at that moment: what had been computed there, and had not been
evicted. A cache counts up to its session's last event. With perfect routing the request would have
gone to the cache that has the longest beginning of its prompt. With one shared cache it would have
found every block that any of them had, up to the first that none had. Neither changes what was in
the caches, so both are what these caches had to give, and no simulation of another run.

Moments of different hosts are compared by their wall clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from analysis.fleet.shared import Frames, unpacked
from analysis.prefix.prompts import ENGINES

_CHUNK = 20_000
"""Missed blocks that are compared at once: a block may be in the caches of a thousand replicas."""


@dataclass(frozen=True)
class Lost:
    """Tokens of a replica's prompts that it had to compute. ``routed_tokens``: with perfect routing
    the request would have found them. ``shared_tokens``: in one shared cache."""

    deployment: str | None
    replica: str
    routed_tokens: int
    shared_tokens: int


@dataclass(frozen=True)
class Routing:
    """``joined``: sessions whose contents have the same key as those of another one. All figures
    are theirs. ``apart``: the other sessions, ``because``: why, by the words of their metadata;
    empty where it is not known.

    ``query_tokens`` and ``found_tokens``: prompt tokens of the lookups that count, and those that
    were found, a KV connector's included. ``hit_rate``: their share, as it was;
    ``perfect_routing`` and ``shared_cache``: as it would have been. Shares are from 0 to 1, None
    where nothing is joined. ``replicas``: those that lost any, the most first.
    """

    joined: int
    apart: int
    because: tuple[str, ...]
    query_tokens: int
    found_tokens: int
    routed_tokens: int
    shared_tokens: int
    hit_rate: float | None
    perfect_routing: float | None
    shared_cache: float | None
    replicas: tuple[Lost, ...]


def gains(parts: Iterable[tuple[int, bytes]]) -> Mapping[int, tuple[int, int]]:
    """Tokens that each session would have found besides, with perfect routing and in one shared
    cache.

    Args:
        parts: the same part of several sessions, each with the session's number.

    """
    frames = [_numbered(number, unpacked(part)) for number, part in parts]
    if len(frames) < 2:
        return {}
    asked, chains, spans = (pl.concat(each) for each in zip(*frames, strict=True))
    asked = asked.filter(pl.col("first") < pl.col("beyond")).with_row_index("id")
    missed = _missed_elsewhere(
        asked.join(chains, on="request").filter(
            pl.col("index").is_between("first", pl.col("beyond") - 1)
        ),
        spans,
    )
    found: dict[int, tuple[int, int]] = {}
    for chunk in _chunks(missed):
        for session, routed, shared in _gains(chunk, chains, spans).iter_rows():
            before = found.get(session, (0, 0))
            found[session] = (before[0] + routed, before[1] + shared)
    return found


def _numbered(session: int, frames: Frames) -> Frames:
    """Requests and caches with numbers that no other session has."""
    asked, chains, spans = frames
    own_request = pl.col("request").cast(pl.Int64) + session * 2**32
    own_cache = pl.col("cache") + session * ENGINES
    return (
        asked.with_columns(own_request, own_cache, session=pl.lit(session, pl.Int64)),
        chains.with_columns(own_request),
        spans.with_columns(own_cache),
    )


def _missed_elsewhere(missed: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """The missed blocks of lookups that missed any which more than one cache had at some time. Most
    contents are in one."""
    several = spans.group_by("content").agg(pl.col("cache").n_unique()).filter(pl.col("cache") > 1)
    lookups = missed.join(several, on="content", how="semi").select("id").unique()
    return missed.join(lookups, on="id", how="semi").sort("id", "index")


def _chunks(missed: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The rows in pieces, all of a lookup in one."""
    ends = missed["id"].rle_id() if missed.height else pl.Series([], dtype=pl.UInt32)
    start = 0
    while start < missed.height:
        last = min(start + _CHUNK, missed.height) - 1
        end = int(ends.search_sorted(ends[last], side="right"))
        yield missed.slice(start, end - start)
        start = end


_THERE = (pl.col("from_us") < pl.col("at_us")) & (pl.col("at_us") <= pl.col("until_us"))
"""What is computed at a moment is there from then on; what is lost at it was there."""


def _gains(missed: pl.DataFrame, chains: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Columns: ``session``, ``routed`` and ``shared`` (tokens)."""
    had = missed.rename({"cache": "own"}).join(spans, on="content").filter(_THERE)
    shared = _runs(had.unique(["id", "index"]), ["id"]).select("id", shared="blocks")
    elsewhere = had.filter(pl.col("cache") != pl.col("own")).unique(["id", "cache", "index"])
    routed = _with_beginning(_runs(elsewhere, ["id", "cache"]), missed, chains, spans)
    best = routed.group_by("id").agg(routed=pl.col("blocks").max())
    size = pl.col("block_size")
    return (
        missed.unique("id")
        .join(shared, on="id")
        .join(best, on="id", how="left")
        .group_by("session")
        .agg((pl.col("routed").fill_null(0) * size).sum(), (pl.col("shared") * size).sum())
    )


def _runs(rows: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """How many blocks in a row from the first missed one on; only where there is one."""
    place = pl.int_range(pl.len()).over(*by)
    return (
        rows.sort(*by, "index")
        .filter(pl.col("index") - pl.col("first") == place)
        .group_by(by)
        .agg(blocks=pl.len().cast(pl.Int64))
    )


def _with_beginning(
    runs: pl.DataFrame, missed: pl.DataFrame, chains: pl.DataFrame, spans: pl.DataFrame
) -> pl.DataFrame:
    """The runs in caches that also had what was found, at that moment."""
    wanted = runs.join(missed.select("id", "request", "first", "at_us").unique("id"), on="id")
    counted = (
        wanted.filter(pl.col("first") > 0)
        .join(chains, on="request")
        .filter(pl.col("index") < pl.col("first"))
        .join(spans, on=["content", "cache"])
        .filter(_THERE)
        .group_by("id", "cache")
        .agg(has=pl.col("index").n_unique())
    )
    return wanted.join(counted, on=["id", "cache"], how="left").filter(
        pl.col("has").fill_null(0) == pl.col("first")
    )
