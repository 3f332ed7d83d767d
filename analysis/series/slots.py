# SPDX-License-Identifier: Apache-2.0
"""How many slots of the pools held a token, over time?

A request's last block is partly empty, and blocks that several requests share are full. So each
request has empty slots of its own: those of its prompt until its first token, and on average those
of all lengths that it grew through from then on (``analysis.pool.fragmentation``). All other slots
of held blocks hold a token. Preempted requests count as if they had no empty slots, as their rows
do not say when they held blocks, and so do those that have not ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.pool.fragmentation import slots, slots_up_to
from analysis.series.bins import Bins
from analysis.series.pools import PoolSeries, Values

Floats = NDArray[np.float64]

COLUMNS = (
    "timestamp",
    "input_length",
    "queue_sec",
    "first_token_sec",
    "finish_sec",
    "computed_tokens",
    "num_blocks",
    "preemptions",
)
"""Of requests.jsonl."""


@dataclass(frozen=True)
class SlotSeries:
    """Slots of all pools together, the mean of each bin: with a ``token``, ``empty`` ones of held
    blocks, those of ``cached`` blocks, which hold tokens, too, and of ``free`` ones. None before
    the first row of any pool."""

    token: Values
    empty: Values
    cached: Values
    free: Values


@dataclass
class SlotTally:
    """Adds up the empty slots of requests at the edges of ``bins``."""

    bins: Bins
    block_size: int
    until: Floats = field(init=False)
    """Slots x seconds up to each edge."""
    requests: int = 0
    """That ended with blocks."""

    def __post_init__(self) -> None:
        self.until = np.zeros(self.bins.count + 1)

    def add(self, batch: pl.DataFrame) -> None:
        first, end = pl.col("first_token_sec"), pl.col("finish_sec")
        held = (pl.col("num_blocks") > 0) & (pl.col("preemptions") == 0) & first.is_not_null()
        prompt, size = pl.col("input_length"), self.block_size
        last = pl.max_horizontal("computed_tokens", prompt)
        # The tokens of a request that grows through prompt + 1, prompt + 2, ... last, added up.
        grown = (last - prompt) * (prompt + 1 + last) / 2
        rest = slots_up_to(last, size) - slots_up_to(prompt, size) - grown
        self.requests += batch.filter(pl.col("num_blocks") > 0).height
        lives = (
            batch.filter(held)
            .select(
                admitted=pl.col("timestamp") / 1e3 + pl.col("queue_sec"),
                first=first,
                end=end,
                of_prompt=slots(prompt, size) - prompt,
                of_answer=pl.when(last > prompt)
                .then(rest / (last - prompt))
                .otherwise(slots(prompt, size) - prompt),
            )
            .drop_nulls()
        )
        admitted, begun, ended = (lives[at].to_numpy() for at in ("admitted", "first", "end"))
        edges = np.array(self.bins.edges)
        self.until += _passed(admitted, begun, lives["of_prompt"].to_numpy(), edges)
        self.until += _passed(begun, ended, lives["of_answer"].to_numpy(), edges)

    def result(self, pools: PoolSeries) -> SlotSeries | None:
        """The slots, from the blocks of the pools in the same bins; None where no request ended
        with blocks."""
        if not self.requests:
            return None
        empty = np.diff(self.until) / self.bins.width_sec

        def times(blocks: Values) -> Values:
            return tuple(None if one is None else one * self.block_size for one in blocks)

        held = times(pools.held)
        inside = [
            None if all_slots is None else min(max(float(found), 0.0), all_slots)
            for found, all_slots in zip(empty, held, strict=True)
        ]
        return SlotSeries(
            token=tuple(
                None if all_slots is None or found is None else all_slots - found
                for all_slots, found in zip(held, inside, strict=True)
            ),
            empty=tuple(inside),
            cached=times(pools.cached),
            free=times(pools.free),
        )


def _passed(begin: Floats, end: Floats, each: Floats, edges: Floats) -> Floats:
    """The sum of ``each`` times the seconds that passed of its span up to each edge."""
    end = np.maximum(begin, end)
    return _ramps(begin, each, edges) - _ramps(end, each, edges)


def _ramps(begin: Floats, each: Floats, edges: Floats) -> Floats:
    """The sum of ``each`` times the seconds from its begin to each edge, where that is later."""
    order = np.argsort(begin)
    begin, each = begin[order], each[order]
    reached = np.searchsorted(begin, edges)
    rate = np.concatenate([[0.0], np.cumsum(each)])[reached]
    at_begin = np.concatenate([[0.0], np.cumsum(each * begin)])[reached]
    total: Floats = rate * edges - at_begin
    return total
