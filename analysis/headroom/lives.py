# SPDX-License-Identifier: Apache-2.0
"""How many blocks does a request hold, from its first step to its last?

A life goes by steps. A prompt takes a step for each ``max_num_scheduled_tokens`` of it that the
cache did not have, and at least one; each token of the answer after the first takes one more. The
whole prompt holds its blocks from the first step on, and each step of the answer adds a token.
Steps do not depend on how full the pool was or on how long the request waited, so the lives of a
crowded session are those of a roomy one.

Requests whose prompts share contents share their blocks while both run, where they may read the
cache. That is known by *stretches* (``analysis.prefix.stretches``). What an answer fills is its
own: vLLM does not look for it elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.tables.facts import Scheduler
from analysis.tables.session import Session

Ints = NDArray[np.int64]

TABLE = "requests"

COLUMNS = (
    "timestamp",
    "input_length",
    "output_length",
    "computed_tokens",
    "hit_tokens",
    "external_hit_tokens",
)
"""Of requests.jsonl."""


@dataclass(frozen=True)
class Stretches:
    """The stretches of prompts that several requests have, one life after the other. ``offsets``:
    where those of each life begin, and where the last ones end. ``blocks``: how many each has.
    ``key``: a number, the same for the same contents; ``keys``: how many there are."""

    offsets: Ints
    blocks: Ints
    key: Ints
    keys: int

    @property
    def of_each(self) -> Ints:
        """Blocks of all stretches of each life."""
        total = np.concatenate([[0], np.cumsum(self.blocks)])
        blocks: Ints = total[self.offsets[1:]] - total[self.offsets[:-1]]
        return blocks


@dataclass(frozen=True)
class Lives:
    """The requests that ended and had computed anything; each array has an entry for each.

    ``block_size``: in tokens. ``prompt``: tokens of the prompt, and slots held ahead for drafts.
    ``prompt_steps``: steps that the prompt takes. ``answer_steps``: steps that add a token.
    ``computed``: tokens of the prompt that were not found in the cache.
    """

    block_size: int
    prompt: Ints
    prompt_steps: Ints
    answer_steps: Ints
    computed: Ints
    stretches: Stretches

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def steps(self) -> Ints:
        """Steps of each life."""
        return self.prompt_steps + self.answer_steps

    @property
    def first_blocks(self) -> Ints:
        """Blocks that each request holds from its first step on."""
        return -(-self.prompt // self.block_size)

    @property
    def last_blocks(self) -> Ints:
        """Blocks that each request holds at its end."""
        return -(-(self.prompt + self.answer_steps) // self.block_size)

    def blocks_at(self, life: Ints, step: Ints) -> Ints:
        """Blocks that these requests hold in these steps of their lives, counted from 0."""
        added = np.maximum(step - self.prompt_steps[life] + 1, 0)
        blocks: Ints = -(-(self.prompt[life] + added) // self.block_size)
        return blocks


def read(session: Session, uses: pl.DataFrame, block_size: int, scheduler: Scheduler) -> Lives:
    """The lives of the session's requests, without the warm-up.

    Args:
        session: the session.
        uses: what ``analysis.prefix.reuse.uses`` returns for it.
        block_size: tokens of a block.
        scheduler: its settings.

    Raises:
        SessionError: the table cannot be read.

    """
    parts, count = [], 0
    for batch in session.batches(TABLE, COLUMNS, history=True):
        # The numbers are those of ``analysis.prefix.prompts``, which counts the same rows.
        numbered = batch.with_row_index("request", offset=count)
        count += batch.height
        parts.append(_lives(numbered.filter(session.in_window(TABLE)), scheduler))
    rows = pl.concat(parts) if parts else pl.DataFrame(schema=_SCHEMA)
    return Lives(
        block_size=block_size,
        **{name: _ints(rows[name]) for name in _SCHEMA if name != "request"},
        stretches=_stretches(rows["request"], uses),
    )


_SCHEMA = {
    "request": pl.UInt32,
    "prompt": pl.Int64,
    "prompt_steps": pl.Int64,
    "answer_steps": pl.Int64,
    "computed": pl.Int64,
}


def _lives(requests: pl.DataFrame, scheduler: Scheduler) -> pl.DataFrame:
    prompt = pl.col("input_length")
    found = pl.col("hit_tokens").fill_null(0) + pl.col("external_hit_tokens").fill_null(0)
    last = pl.coalesce("computed_tokens", prompt + pl.col("output_length") - 1)
    rest = (prompt - found).clip(1)
    budget = scheduler.max_num_scheduled_tokens or 0
    steps = (rest + budget - 1) // budget if budget > 0 else pl.lit(1)
    return (
        requests.filter((last > 0) & (prompt > 0))
        .select(
            "request",
            prompt=prompt + (scheduler.lookahead_tokens or 0),
            prompt_steps=steps.cast(pl.Int64),
            answer_steps=(last - prompt).clip(0),
            computed=rest,
        )
        .cast(_SCHEMA)  # type: ignore[arg-type]
    )


def _stretches(requests: pl.Series, uses: pl.DataFrame) -> Stretches:
    """The stretches that these requests could find, and that several requests used."""
    lives = pl.DataFrame({"request": requests}).with_row_index("life")
    rows = (
        uses.filter("asked")
        .select("request", "key", "blocks")
        .join(lives, on="request")
        .sort("life")
    )
    key = np.unique(_ints(rows["key"]), return_inverse=True)[1].ravel()
    counts = np.bincount(_ints(rows["life"]), minlength=len(requests))
    return Stretches(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        blocks=_ints(rows["blocks"]),
        key=key.astype(np.int64),
        keys=int(key.max(initial=-1)) + 1,
    )


def _ints(values: pl.Series) -> Ints:
    numbers: Ints = values.cast(pl.Int64).to_numpy()
    return numbers
