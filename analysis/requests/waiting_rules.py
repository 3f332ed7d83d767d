# SPDX-License-Identifier: Apache-2.0
"""Which rule of vLLM's scheduler keeps requests waiting at the end of a step?

The rules are those of ``Scheduler.schedule`` in vLLM 0.32 (vllm/v1/core/sched/scheduler.py), in
its order. A step that preempts admits no request. Any other step admits requests while it has
tokens left, and places among the running ones. The request at the head of the queue needs its
adapter, and then its blocks (``KVCacheManager.allocate_slots``).

Each rule is a Polars expression over a step's row: the columns of scheduler_steps.csv,
``available`` (blocks of the pool), ``query_tokens`` and ``hit_tokens`` (of the head that was looked
up last), ``next_tokens`` (of the request that is admitted next) and ``adapters`` (that run).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from analysis.pool.usable import block_size_of, usable_blocks
from analysis.pool.usage import Usage
from analysis.tables.facts import Facts


@dataclass(frozen=True)
class Rules:
    """The rules for a configuration.

    ``block_size``: tokens in a block, None where a request's tokens do not say how many blocks it
    needs. ``usable``: blocks that requests can hold, by engine.
    """

    facts: Facts
    block_size: int | None
    usable: Mapping[int, int]

    @classmethod
    def of(cls, facts: Facts, usage: Usage) -> Rules:
        """The rules that a session's engines went by."""
        return cls(facts, block_size_of(facts, usage), usable_blocks(facts, usage))

    def preempting(self) -> pl.Expr:
        """Whether the step preempted a request."""
        return pl.col("preempted_reqs").fill_null(0) > 0

    def token_budget(self) -> pl.Expr:
        """Whether the step gave all its tokens out."""
        limits = self.facts.scheduler
        slots = limits.draft_slots or 0
        tokens, requests = pl.col("scheduled_tokens"), pl.col("scheduled_reqs")
        spent = [
            tokens >= pl.lit(limits.max_num_scheduled_tokens, pl.Int64),
            tokens + slots * (requests + 1) >= pl.lit(limits.max_num_batched_tokens, pl.Int64),
        ]
        return pl.any_horizontal(*(rule.fill_null(False) for rule in spent))

    def max_num_seqs(self) -> pl.Expr:
        """Whether as many requests ran as may."""
        places = pl.lit(self.facts.scheduler.max_num_active_seqs, pl.Int64)
        return (pl.col("running_reqs") >= places).fill_null(False)

    def _refusal(self, usable: int | None, tokens: pl.Expr, hit: pl.Expr) -> pl.Expr:
        """Why a head with so many tokens, ``hit`` of them found, was not admitted.

        Null where blocks do not explain it.
        """
        limits, size = self.facts.scheduler, self.block_size
        left = pl.lit(limits.max_num_scheduled_tokens, pl.Int64) - pl.col("scheduled_tokens")
        new = tokens - hit
        no_chunking = pl.lit(limits.chunked_prefill is False) & (new > left)
        if size is None or usable is None:
            return pl.when(no_chunking).then(pl.lit("no_chunking"))
        chunk = pl.min_horizontal(new, left)
        if limits.long_prefill_token_threshold:
            several = pl.col("running_reqs") + pl.col("waiting_reqs") > 1
            capped = pl.min_horizontal(chunk, limits.long_prefill_token_threshold)
            chunk = pl.when(several).then(capped).otherwise(chunk)
        next_chunk = _blocks(hit + chunk + (limits.lookahead_tokens or 0), size)
        whole = pl.max_horizontal(next_chunk, _blocks(tokens, size))
        needed = whole if limits.scheduler_reserve_full_isl else next_chunk
        # Blocks of the hit need room only if no other request holds them, which is not known.
        shared, available = hit // size, pl.col("available")
        return (
            pl.when(no_chunking)
            .then(pl.lit("no_chunking"))
            .when(_blocks(tokens, size) > usable)
            .then(pl.lit("never_fits"))
            .when(next_chunk - shared > available)
            .then(pl.lit("no_blocks"))
            .when(needed - shared > available)
            .then(pl.lit("whole_prompt"))
            .when(needed - shared + self._watermark(usable) > available)
            .then(pl.lit("watermark"))
            .when(next_chunk > available)
            .then(pl.lit("no_blocks"))
            .when(needed > available)
            .then(pl.lit("whole_prompt"))
            .when(needed + self._watermark(usable) > available)
            .then(pl.lit("watermark"))
        )

    def _watermark(self, usable: int) -> pl.Expr:
        """Blocks that an admission must leave free while requests run.

        KVCacheManager takes them as a share of all blocks, the null block included.
        """
        blocks = int((self.facts.scheduler.watermark or 0) * (usable + 1))
        return pl.when(pl.col("running_reqs") > 0).then(blocks).otherwise(0)

    def of_looked_up(self, usable: int | None) -> pl.Expr:
        """The reason of steps that looked the head up and did not admit it, as text.

        ``usable``: blocks that requests can hold in the engine's pool.
        """
        unexplained = "not_known"
        if self.facts.scheduler.connector:
            unexplained = "connector"
        elif self.block_size is None:
            unexplained = "blocks"
        reason = self._refusal(usable, pl.col("query_tokens"), pl.col("hit_tokens"))
        return reason.fill_null(pl.lit(unexplained))

    def of_not_looked_up(self, usable: int | None) -> pl.Expr:
        """The reason of steps that had tokens and places left and looked no request up, as text.

        ``usable``: blocks that requests can hold in the engine's pool.
        """
        limits = self.facts.scheduler
        if self.facts.prefix_caching is False:
            refusal = self._refusal(usable, pl.col("next_tokens"), pl.lit(0))
        else:
            refusal = pl.lit(None, pl.String)
        adapters = pl.col("adapters") >= pl.lit(limits.max_loras, pl.Int64)
        return (
            pl.when(adapters.fill_null(False))
            .then(pl.lit("lora"))
            .when(pl.lit(bool(limits.connector)))
            .then(pl.lit("connector"))
            .when(refusal.is_not_null())
            .then(refusal)
            .when(pl.col("scheduled_tokens") == 0)
            .then(pl.lit("paused"))
            .otherwise(pl.lit("not_known"))
        )


def _blocks(tokens: pl.Expr, size: int) -> pl.Expr:
    return (tokens + size - 1) // size
