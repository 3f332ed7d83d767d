# SPDX-License-Identifier: Apache-2.0
"""How deep do prompts share their beginnings, and how much of that did the cache find?

A block's content id stands for all the tokens before it, too, so two prompts whose ids agree at a
depth share everything up to there. What a prompt shares with another one could have been found, had
nothing been evicted and had the other come first: all but the first prompt of each prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

COLUMNS = ("engine", "hash_ids", "input_length", "block_size", "hit_tokens")

DEPTHS = tuple(2**power for power in range(13))
"""In blocks: 1, 2, 4 and so on."""


@dataclass(frozen=True)
class Depth:
    """The prompts of at least ``blocks`` full blocks (``tokens``), on all engines.

    ``prompts``: how many they are; ``distinct``: how many different beginnings of that length;
    ``shareable``: those that another prompt of the same engine began like, less one for each
    beginning; ``found``: those that had so much found in the cache; ``hottest``: prompts that
    begin like the most frequent one.
    """

    blocks: int
    tokens: int
    prompts: int
    distinct: int
    shareable: int
    found: int
    hottest: int


@dataclass(frozen=True)
class Depths:
    """One entry a depth that any prompt has. ``block_size``: tokens a content id stands for, None
    where there is none or where engines differ (then ``depths`` is empty)."""

    depths: tuple[Depth, ...]
    block_size: int | None


@dataclass
class DepthTally:
    """The rows of requests.jsonl seen so far: eight bytes for each prompt and depth."""

    _ids: dict[int, list[pl.DataFrame]] = field(
        default_factory=lambda: {depth: [] for depth in DEPTHS}
    )
    _found: dict[int, int] = field(default_factory=lambda: dict.fromkeys(DEPTHS, 0))
    _sizes: set[int] = field(default_factory=set)

    def add(self, batch: pl.DataFrame) -> None:
        known = batch.select(COLUMNS).filter(
            pl.col("hash_ids").list.len() > 0, pl.col("block_size") > 0
        )
        self._sizes.update(known["block_size"].unique())
        full = pl.col("input_length") // pl.col("block_size")
        for depth in DEPTHS:
            deep = known.filter(full >= depth)
            if deep.is_empty():
                return
            content_id = pl.col("hash_ids").list.get(depth - 1, null_on_oob=True)
            self._ids[depth].append(deep.select("engine", content_id=content_id).drop_nulls())
            hit = pl.col("hit_tokens") >= depth * pl.col("block_size")
            self._found[depth] += deep.filter(hit).height

    def result(self) -> Depths:
        if len(self._sizes) != 1:
            return Depths((), None)
        (size,) = self._sizes
        depths = (self._depth(depth, size) for depth in DEPTHS if self._ids[depth])
        return Depths(tuple(depth for depth in depths if depth.prompts), size)

    def _depth(self, depth: int, size: int) -> Depth:
        beginnings = pl.concat(self._ids.pop(depth)).group_by("engine", "content_id").len()
        prompts, distinct = int(beginnings["len"].sum()), beginnings.height
        hottest = beginnings["len"].max()
        return Depth(
            blocks=depth,
            tokens=depth * size,
            prompts=prompts,
            distinct=distinct,
            shareable=prompts - distinct,
            found=self._found[depth],
            hottest=0 if hottest is None else int(str(hottest)),
        )
