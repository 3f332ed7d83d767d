# SPDX-License-Identifier: Apache-2.0
"""How deep do prompts share their beginnings, and how much of that did the cache find?

A content id stands for all tokens up to the end of its block, so two prompts with the same id at a
depth share all up to there. A lookup could have found what a prompt shares with an earlier one, had
nothing been evicted: in all prompts of a prefix but the first.
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

    ``prompts``: how many there are. ``distinct``: how many different beginnings of that length
    they have. ``shareable``: prompts whose beginning an earlier one of the same engine had.
    ``found``: prompts that found at least so much in the cache. ``hottest``: how many begin with
    the most frequent beginning.
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
    """An entry for each depth that a prompt has. ``block_size``: tokens in a block; None, with no
    depth, where there is no prompt or where engines differ."""

    depths: tuple[Depth, ...]
    block_size: int | None


@dataclass
class DepthTally:
    """Keeps eight bytes for each prompt and depth."""

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
