# SPDX-License-Identifier: Apache-2.0
"""What holds in every row of a table, whatever the release and the load?

A row that breaks a rule was not written by the collector: the file is damaged. So each rule follows
from how the collector makes the row, and none from what is usual. An empty cell breaks no rule.
``analysis.tables.schema`` has the bounds of single columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

MOST_APART_SEC = 1.0
"""Times of one call are taken one after the other, in whatever order: so much may lie between."""

MOST_AHEAD_TOKENS = 1 << 16
"""Tokens that an engine may count beyond a request's own: drafts, steps in flight, and the rest of
a block that a KV connector filled."""


@dataclass(frozen=True)
class Rule:
    """``holds``: of a row, from its ``columns``. ``broken``: what to say of a row where it does
    not."""

    columns: tuple[str, ...]
    holds: pl.Expr
    broken: str


def _word(column: str, *words: str) -> Rule:
    return Rule((column,), pl.col(column).is_in(words), f"{column} is none of {', '.join(words)}")


def _at_least_one(column: str) -> Rule:
    return Rule((column,), pl.col(column) >= 1, f"{column} is less than 1")


def _switch(column: str) -> Rule:
    return Rule((column,), pl.col(column) <= 1, f"{column} is neither 0 nor 1")


def _at_most(less: str, more: str, broken: str, apart: float = 0) -> Rule:
    return Rule((less, more), pl.col(less) <= pl.col(more) + apart, broken)


_BATCH = (_switch("uniform"), _switch("has_lora"))

_USAGE = (
    Rule(
        ("num_blocks", "cached_blocks", "free_blocks", "total_blocks"),
        pl.col("num_blocks") + pl.col("cached_blocks") + pl.col("free_blocks")
        == pl.col("total_blocks"),
        "held, cached and free blocks together are not the pool's",
    ),
)

_ALLOCATIONS = (
    _word("event", "allocate", "reuse", "free", "cache", "reset", "reset_refused", "held"),
    _at_most("evicted_blocks", "num_blocks", "more contents were evicted than blocks moved"),
)

_EVICTIONS = (
    _word("reason", "reallocated", "explicit", "reset"),
    _word("origin", "prompt", "output"),
    _at_most(
        *("idle_sec", "lifetime_sec", "the block was last used before it was allocated"),
        MOST_APART_SEC,
    ),
    _at_most(
        *("evictable_sec", "idle_sec", "the block was freed before it was last used"),
        MOST_APART_SEC,
    ),
)

_LOOKUPS = (
    _word("kind", "first", "retry", "resumed", "skipped"),
    _switch("admitted"),
    _at_least_one("lookups"),
    _at_most("hit_tokens", "query_tokens", "more tokens were found than asked for"),
    _at_most(
        *("external_hit_tokens", "query_tokens", "more tokens were found than asked for"),
        MOST_AHEAD_TOKENS,
    ),
)

_STEPS = (
    _at_least_one("step"),
    _at_least_one("repeats"),
    Rule(
        ("repeats", "scheduled_tokens"),
        (pl.col("repeats") <= 1) | (pl.col("scheduled_tokens") == 0),
        "the row stands for several steps, and only steps without a token are put together",
    ),
    Rule(
        ("scheduled_tokens", "prefill_tokens", "decode_tokens"),
        pl.col("prefill_tokens") + pl.col("decode_tokens") == pl.col("scheduled_tokens"),
        "the tokens of prompts and answers together are not those scheduled",
    ),
    _at_most("scheduled_reqs", "scheduled_tokens", "a request was scheduled without a token"),
    Rule(
        ("timestamp_sec", "schedule_us"),
        pl.col("schedule_us") / 1e6 <= pl.col("timestamp_sec") + MOST_APART_SEC,
        "schedule() began before the session",
    ),
)

_CAPTURES = (*_BATCH, _word("kind", "capture", "profiling"), _at_least_one("num_graphs"))

_GRAPH_USAGE = (
    *_BATCH,
    _at_least_one("num_graphs"),
    _at_most("dummy_count", "replay_count", "more replays served no request than there were"),
)

_TIMELINE = (*_BATCH, _switch("dummy"))

MOST_TOKENS_A_SEC = 1e6
"""No engine gives one request more tokens in a second, by far."""

_TOKENS = pl.col("input_length") + pl.col("output_length")
_ARRIVED = pl.col("timestamp") / 1e3

_REQUESTS = (
    Rule(
        ("timestamp", "first_token_sec"),
        pl.col("first_token_sec") + MOST_APART_SEC >= _ARRIVED,
        "its first token came before it arrived",
    ),
    Rule(
        ("timestamp", "finish_sec"),
        pl.col("finish_sec") + MOST_APART_SEC >= _ARRIVED,
        "it ended before it arrived",
    ),
    Rule(
        ("timestamp", "queue_sec", "finish_sec"),
        _ARRIVED + pl.col("queue_sec") <= pl.col("finish_sec") + MOST_APART_SEC,
        "it ended before it was admitted",
    ),
    _at_most(
        *("first_token_sec", "finish_sec", "it ended before its first token"),
        MOST_APART_SEC,
    ),
    Rule(
        ("output_length", "timestamp", "finish_sec"),
        pl.col("output_length")
        <= (pl.col("finish_sec") - _ARRIVED + MOST_APART_SEC) * MOST_TOKENS_A_SEC,
        "no engine gives so many tokens in so little time",
    ),
    Rule(
        ("hit_tokens", "input_length", "output_length"),
        pl.col("hit_tokens") <= _TOKENS,
        "more tokens were found than it has",
    ),
    Rule(
        ("external_hit_tokens", "input_length", "output_length"),
        pl.col("external_hit_tokens") <= _TOKENS + MOST_AHEAD_TOKENS,
        "more tokens were found than it has",
    ),
    Rule(
        ("computed_tokens", "input_length", "output_length"),
        pl.col("computed_tokens") <= _TOKENS + MOST_AHEAD_TOKENS,
        "more tokens were computed than it has",
    ),
    Rule(
        ("hash_ids", "input_length", "block_size"),
        (pl.col("hash_ids").list.len() == 0)
        | (
            (pl.col("hash_ids").list.len().cast(pl.Int64) - 1) * pl.col("block_size")
            < pl.col("input_length")
        ),
        "its prompt has more contents than blocks",
    ),
    Rule(
        ("output_hash_ids", "input_length", "output_length", "block_size"),
        pl.col("output_hash_ids").list.len().cast(pl.Int64) * pl.col("block_size") <= _TOKENS,
        "its answer has more contents than blocks",
    ),
)

_GPU_STEPS = (
    _at_most("prefill_reqs", "prefill_tokens", "a request has no token"),
    _at_most("decode_reqs", "decode_tokens", "a request has no token"),
)

_EXPERTS = (
    _at_most("since_sec", "timestamp_sec", "it was counted before that began", MOST_APART_SEC),
    Rule(
        ("by_expert",),
        pl.col("by_expert").str.contains(r"^\d{1,16}( \d{1,16})*$"),
        "by_expert is no list of counts with a space between two",
    ),
    Rule(
        ("by_rank",),
        pl.col("by_rank").str.contains(r"^(\d{1,16}( \d{1,16})*)?$"),
        "by_rank is no list of counts with a space between two",
    ),
)

_PAIRS = (
    Rule(
        ("expert", "other_expert"),
        pl.col("expert") < pl.col("other_expert"),
        "the second expert is not behind the first",
    ),
    _at_most("pair_tokens", "expert_tokens", "a pair has more tokens than its expert"),
    _at_most("pair_tokens", "other_expert_tokens", "a pair has more tokens than its expert"),
    _at_most("expert_tokens", "routed_tokens", "an expert has more tokens than were routed"),
    _at_most("other_expert_tokens", "routed_tokens", "an expert has more tokens than were routed"),
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "kv_cache_usage": _USAGE,
    "kv_cache_allocations": _ALLOCATIONS,
    "kv_cache_evictions": _EVICTIONS,
    "prefix_cache_lookups": _LOOKUPS,
    "scheduler_steps": _STEPS,
    "cuda_graph_captures": _CAPTURES,
    "cuda_graph_usage": _GRAPH_USAGE,
    "cuda_graph_timeline": _TIMELINE,
    "gpu_memory": (),
    "gpu_steps": _GPU_STEPS,
    "moe_experts": _EXPERTS,
    "moe_pairs": _PAIRS,
    "requests": _REQUESTS,
}
"""By table."""
