# SPDX-License-Identifier: Apache-2.0
"""Sound rows of each table, and what to change in one so that no session can have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.analysis.builder import COLUMNS, sound_row

Row = dict[str, Any]
Impossible = Callable[[Mapping[str, Any]], Row]

REQUEST: Row = {
    "timestamp": 1000.0,
    "input_length": 40,
    "output_length": 10,
    "hash_ids": [1, 2, 3],
    "block_size": 16,
    "request_id": "a",
    "engine": 0,
    "output_hash_ids": [4],
    "hit_tokens": 16,
    "external_hit_tokens": 0,
    "preemptions": 0,
    "num_blocks": 4,
    "queue_sec": 0.5,
    "first_token_sec": 2.0,
    "finish_sec": 3.0,
    "finish_reason": "stop",
    "prefix_ids": [7],
    "lora": None,
    "tenant": None,
    "priority": 0,
    "computed_tokens": 49,
}


def sound(table: str) -> Row:
    """A sound row of a table."""
    if table not in COLUMNS:
        return REQUEST
    return dict(zip(COLUMNS[table].split(","), sound_row(table), strict=True))


def _huge(column: str) -> Impossible:
    return lambda row: {column: 2147483647}


IMPOSSIBLE: Mapping[str, tuple[Impossible, ...]] = {
    "kv_cache_usage.csv": (
        _huge("usage_pct"),
        lambda row: {"usage_pct": 100.01},
        lambda row: {"num_blocks": int(row["total_blocks"]) + 1},
        lambda row: {"free_blocks": int(row["free_blocks"]) + 1},
        lambda row: {"total_blocks": int(row["total_blocks"]) - 1},
        lambda row: {"timestamp_sec": 1e11},
    ),
    "kv_cache_allocations.csv": (
        lambda row: {"event": "alocate"},
        lambda row: {"evicted_blocks": int(row["num_blocks"]) + 1},
        lambda row: {"num_blocks": -1},
    ),
    "kv_cache_evictions.csv": (
        lambda row: {"reason": "unknown"},
        lambda row: {"origin": "nowhere"},
        lambda row: {"idle_sec": float(row["lifetime_sec"]) + 1.5},
        lambda row: {"evictable_sec": float(row["idle_sec"]) + 1.5},
    ),
    "prefix_cache_lookups.csv": (
        lambda row: {"hit_tokens": int(row["query_tokens"]) + 1},
        lambda row: {"external_hit_tokens": int(row["query_tokens"]) + 70_000},
        lambda row: {"kind": "second"},
        lambda row: {"admitted": 2},
        lambda row: {"lookups": 0},
        _huge("query_tokens"),
    ),
    "scheduler_steps.csv": (
        lambda row: {"step": 0},
        lambda row: {"repeats": 0},
        lambda row: {"prefill_tokens": int(row["prefill_tokens"] or 0) + 1},
        lambda row: {"decode_tokens": 1e6},
        lambda row: {"scheduled_reqs": int(row["scheduled_tokens"]) + 1},
        lambda row: {"schedule_us": 9e9},
        lambda row: {"repeats": 2, "scheduled_tokens": 1, "prefill_tokens": 1, "decode_tokens": 0},
    ),
    "cuda_graph_captures.csv": (
        lambda row: {"kind": "caught"},
        lambda row: {"num_graphs": 0},
        lambda row: {"uniform": 2},
        lambda row: {"has_lora": 9},
    ),
    "cuda_graph_usage.csv": (
        lambda row: {"dummy_count": int(row["replay_count"]) + 1},
        lambda row: {"num_graphs": 0},
        lambda row: {"uniform": 2},
        lambda row: {"has_lora": 2},
    ),
    "cuda_graph_timeline.csv": (
        lambda row: {"dummy": 2},
        lambda row: {"uniform": 3},
        lambda row: {"has_lora": 2},
    ),
    "gpu_memory.csv": (lambda row: {"utilization_pct": 101}, lambda row: {"used_bytes": 2**60}),
    "gpu_steps.csv": (
        lambda row: {"prefill_reqs": int(row["prefill_tokens"]) + 1},
        lambda row: {"decode_reqs": int(row["decode_tokens"]) + 1},
        lambda row: {"encoder_items": -1},
    ),
    "moe_experts.csv": (
        lambda row: {"by_expert": "1,2"},
        lambda row: {"by_expert": "1 -2"},
        lambda row: {"by_rank": "1;2"},
        lambda row: {"since_sec": float(row["timestamp_sec"]) + 1.5},
    ),
    "moe_pairs.csv": (
        lambda row: {"other_expert": row["expert"]},
        lambda row: {"pair_tokens": int(row["expert_tokens"]) + 1},
        lambda row: {"expert_tokens": int(row["routed_tokens"]) + 1},
        lambda row: {"other_expert_tokens": int(row["routed_tokens"]) + 1},
        lambda row: {"expected_tokens": -1},
    ),
    "requests.jsonl": (
        lambda row: {"finish_sec": row["timestamp"] / 1e3 - 2},
        lambda row: {
            "finish_sec": row["timestamp"] / 1e3 - 2,
            **dict.fromkeys(("first_token_sec", "queue_sec", "output_length")),
        },
        lambda row: {"first_token_sec": row["finish_sec"] + 2},
        lambda row: {"first_token_sec": row["timestamp"] / 1e3 - 2},
        lambda row: {"queue_sec": row["finish_sec"] + 2},
        lambda row: {"hit_tokens": row["input_length"] + row["output_length"] + 1},
        lambda row: {"external_hit_tokens": 99_000_000},
        lambda row: {"computed_tokens": 99_000_000},
        lambda row: {"hash_ids": [*row["hash_ids"], 5, 6, 7] + [1] * row["input_length"]},
        lambda row: {"output_hash_ids": [1] * (row["input_length"] + row["output_length"] + 1)},
        _huge("input_length"),
        _huge("output_length"),
        lambda row: {"output_length": 99_000_000},
    ),
}
"""By table, what to change in a row so that no session can have it."""
