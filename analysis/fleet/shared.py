# SPDX-License-Identifier: Apache-2.0
"""What did a session's requests ask for, and when did its caches have which content?

Sessions whose contents have one key can be put side by side: see ``analysis.fleet.routing``. A
content with everything before it has one first block, so requests with different first blocks have
nothing in common. All is divided into ``PARTS`` by the first block, and each part of the fleet can
be looked at by itself.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from analysis.prefix.prompts import ENGINES, Prompts
from analysis.tables.facts import Facts
from analysis.tables.metadata import wall_clock
from analysis.tables.session import Session

PARTS = 16

_EVICTIONS = "kv_cache_evictions"

Frames = tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]
"""``asked``, ``chains`` and ``spans`` of a part.

``asked``: a row for each lookup that counts. Columns: ``request``, ``cache`` (the engine's rank),
``at_us`` (when, in microseconds since 1970 by the session's wall clock), ``first`` and ``beyond``
(the prompt's blocks from the first to before the second were missed and could be found),
``block_size`` (tokens).
``chains``: a row for each block that a lookup could find. Columns: ``request``, ``index``,
``content``.
``spans``: from when until when a content was in a cache. Columns: ``content``, ``cache``,
``from_us``, ``until_us``.
"""


@dataclass(frozen=True)
class Shared:
    """``key``: names the key of the contents. ``query_tokens`` and ``found_tokens``: of the lookups
    that count. ``parts``: the ``Frames`` of each part, packed."""

    key: str
    query_tokens: int
    found_tokens: int
    parts: tuple[bytes, ...]


def of_session(session: Session, known: Facts, asked: Prompts, key: str) -> Shared | None:
    """What can be put beside other sessions; None where it is not known when the session began.

    Raises:
        SessionError: a table cannot be read.

    """
    began = wall_clock(session.metadata.get("started_at"))
    if began is None:
        return None
    clock = _Clock(round(began * 1e6))
    lookups = asked.asked.filter("in_window")
    found = pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0)
    query_tokens, found_tokens = lookups.select(pl.col("query_tokens").sum(), found.sum()).row(0)
    parts = _part_of_request(asked)
    frames = (
        _asked(lookups, clock).join(parts, on="request"),
        _chains(lookups, asked).join(parts, on="request"),
        _spans(session, known, asked, clock).join(_part_of_content(asked, parts), on="content"),
    )
    return Shared(key, int(query_tokens), int(found_tokens), tuple(_packed(frames)))


def unpacked(part: bytes) -> Frames:
    """What ``Shared.parts`` has packed."""
    file = io.BytesIO(part)
    asked, chains, spans = (
        pl.read_ipc(io.BytesIO(file.read(int.from_bytes(file.read(8), "big")))) for _ in range(3)
    )
    return asked, chains, spans


def _packed(frames: Frames) -> Iterator[bytes]:
    for number in range(PARTS):
        written = []
        for frame in frames:
            file = io.BytesIO()
            frame.filter(pl.col("part") == number).drop("part").write_ipc(file, compression="zstd")
            written.append(file.getvalue())
        yield b"".join(len(each).to_bytes(8, "big") + each for each in written)


@dataclass(frozen=True)
class _Clock:
    """Turns the session's seconds into microseconds since 1970."""

    began_us: int

    def us(self, column: str) -> pl.Expr:
        return self.began_us + (pl.col(column) * 1e6).round().cast(pl.Int64)


def _part_of_request(asked: Prompts) -> pl.DataFrame:
    """The part of each request that has a full block."""
    roots = asked.contents.filter(pl.col("index") == 0)
    return roots.select("request", part=(pl.col("key") // ENGINES) % PARTS)


def _part_of_content(asked: Prompts, parts: pl.DataFrame) -> pl.DataFrame:
    return (
        asked.contents.select("request", content=pl.col("key") // ENGINES)
        .unique("content", keep="first", maintain_order=True)
        .join(parts, on="request")
        .select("content", "part")
    )


_BEYOND = pl.col("full_blocks") - pl.col("ends_prompt").cast(pl.Int64)


def _asked(lookups: pl.DataFrame, clock: _Clock) -> pl.DataFrame:
    return lookups.drop_nulls("request").select(
        "request",
        "block_size",
        cache="engine",
        at_us=clock.us("timestamp_sec"),
        first="first_missed",
        beyond=_BEYOND,
    )


def _chains(lookups: pl.DataFrame, asked: Prompts) -> pl.DataFrame:
    """The blocks of requests that missed any that could be found."""
    missed = lookups.drop_nulls("request").filter(pl.col("first_missed") < _BEYOND)
    ends = missed.group_by("request").agg(beyond=_BEYOND.max())
    return (
        asked.contents.filter("in_prompt")
        .join(ends, on="request")
        .filter(pl.col("index") < pl.col("beyond"))
        .select("request", pl.col("index").cast(pl.Int64), content=pl.col("key") // ENGINES)
    )


def _spans(session: Session, known: Facts, asked: Prompts, clock: _Clock) -> pl.DataFrame:
    """From when on was a content computed, and when was its last copy lost?"""
    events = pl.concat([_made(asked, clock), *_lost(session, known, clock)])
    cache = ["content", "cache"]
    end_us = clock.began_us + round(session.end_sec * 1e6)
    return (
        # Of the same moment, what is lost was made before.
        events.sort(*cache, "at_us", "is_lost")
        .with_columns(epoch=(pl.col("is_lost").cast(pl.Int64).cum_sum().over(cache)))
        .with_columns(pl.col("epoch") - pl.col("is_lost").cast(pl.Int64))
        .group_by(*cache, "epoch")
        .agg(
            from_us=pl.col("at_us").filter(~pl.col("is_lost")).min(),
            until_us=pl.col("at_us").filter("is_lost").max(),
        )
        .drop_nulls("from_us")
        .select(*cache, "from_us", pl.col("until_us").fill_null(end_us))
        .sort(*cache, "from_us")
    )


def _made(asked: Prompts, clock: _Clock) -> pl.DataFrame:
    """When each block of each stint had been computed, as ``analysis.prefix.misses`` has it."""
    token = pl.col("first_token_sec")
    in_prefill = token.is_between("begin_sec", "end_sec") & pl.col("in_prompt")
    made = pl.when(in_prefill).then(token).when("last").then("end_sec")
    return (
        asked.contents.filter("made")
        .join(asked.stints, on="request")
        .with_columns(made_sec=made)
        .drop_nulls("made_sec")
        .select(
            content=pl.col("key") // ENGINES,
            cache=pl.col("key") % ENGINES,
            at_us=clock.us("made_sec"),
            is_lost=pl.lit(value=False),
        )
    )


def _lost(session: Session, known: Facts, clock: _Clock) -> Iterator[pl.DataFrame]:
    columns = ["timestamp_sec", "content_id", "copies_left", "engine", "group"]
    for batch in session.batches(_EVICTIONS, columns, history=True):
        yield (
            batch.filter(
                (pl.col("copies_left").fill_null(0) == 0)
                & (pl.col("group").fill_null(0) == known.full_attention_group)
            )
            .drop_nulls("content_id")
            .select(
                content="content_id",
                cache="engine",
                at_us=clock.us("timestamp_sec"),
                is_lost=pl.lit(value=True),
            )
        )
