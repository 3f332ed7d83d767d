# SPDX-License-Identifier: Apache-2.0
"""Write small sessions by hand: rows as the format's columns, the rest left empty."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLUMNS = {
    "kv_cache_usage.csv": (
        "timestamp_sec,usage_pct,num_blocks,total_blocks,cached_blocks,free_blocks,"
        "running_reqs,waiting_reqs,engine,pool"
    ),
    "kv_cache_allocations.csv": (
        "timestamp_sec,event,num_blocks,request_id,evicted_blocks,step,engine,pool,group"
    ),
    "kv_cache_evictions.csv": (
        "timestamp_sec,lifetime_sec,idle_sec,evictable_sec,block_id,reuse_count,reason,"
        "content_id,copies_left,origin,owner_request,evicting_request,engine,pool,group"
    ),
    "prefix_cache_lookups.csv": (
        "timestamp_sec,request_id,query_tokens,hit_tokens,external_hit_tokens,kind,admitted,"
        "lookups,engine"
    ),
    "scheduler_steps.csv": (
        "timestamp_sec,step,running_reqs,waiting_reqs,scheduled_tokens,prefill_tokens,"
        "decode_tokens,scheduled_reqs,preempted_reqs,finished_reqs,schedule_us,repeats,engine,"
        "encoder_items,encoder_tokens"
    ),
    "cuda_graph_captures.csv": (
        "runtime_mode,num_tokens,num_reqs,uniform,has_lora,capture_time_sec,duration_sec,"
        "num_graphs,memory_bytes,source,kind,worker,part"
    ),
    "cuda_graph_usage.csv": (
        "runtime_mode,num_tokens,num_reqs,uniform,has_lora,replay_count,total_launch_sec,"
        "total_gpu_sec,worker,num_graphs,source,part,dummy_count,capture_time_sec"
    ),
    "cuda_graph_timeline.csv": (
        "timestamp_sec,runtime_mode,num_tokens,num_reqs,uniform,has_lora,unpadded_tokens,"
        "launch_us,gpu_us,dummy,worker,num_graphs"
    ),
    "gpu_memory.csv": "timestamp_sec,gpu,used_bytes,free_bytes,utilization_pct",
    "gpu_steps.csv": (
        "timestamp_sec,worker,prefill_tokens,decode_tokens,prefill_reqs,decode_reqs,gpu_us,"
        "encoder_items,encoder_us"
    ),
    "moe_experts.csv": "timestamp_sec,since_sec,worker,layer,tokens,by_expert,by_rank",
    "moe_pairs.csv": (
        "timestamp_sec,worker,layer,expert,other_expert,routed_tokens,pair_tokens,expected_tokens,"
        "expert_tokens,other_expert_tokens"
    ),
}
"""The header lines, written out: this is the contract, and not what the analyzer believes."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "kv_cache_usage.csv": {"running_reqs": 1, "waiting_reqs": 0, "engine": 0, "pool": 0},
    "kv_cache_allocations.csv": {
        "timestamp_sec": 1,
        "evicted_blocks": 0,
        "step": 1,
        "engine": 0,
        "pool": 0,
        "group": 0,
    },
    "kv_cache_evictions.csv": {
        "timestamp_sec": 1,
        "lifetime_sec": 1,
        "idle_sec": 1,
        "block_id": 1,
        "reuse_count": 0,
        "reason": "reallocated",
        "content_id": 1,
        "copies_left": 0,
        "origin": "prompt",
        "engine": 0,
        "pool": 0,
        "group": 0,
    },
    "prefix_cache_lookups.csv": {
        "timestamp_sec": 1,
        "external_hit_tokens": 0,
        "kind": "first",
        "admitted": 1,
        "lookups": 1,
        "engine": 0,
    },
    "scheduler_steps.csv": {"timestamp_sec": 1, "preempted_reqs": 0, "repeats": 1, "engine": 0},
    "cuda_graph_captures.csv": {
        "uniform": 0,
        "has_lora": 0,
        "capture_time_sec": 1,
        "duration_sec": 0.25,
        "num_graphs": 1,
        "memory_bytes": 0,
        "source": "CudaGraphManager",
        "kind": "capture",
        "worker": 0,
        "part": "model",
    },
    "cuda_graph_usage.csv": {
        "uniform": 0,
        "has_lora": 0,
        "replay_count": 0,
        "total_launch_sec": 0,
        "worker": 0,
        "num_graphs": 1,
        "source": "CudaGraphManager",
        "part": "model",
        "dummy_count": 0,
        "capture_time_sec": 1,
    },
    "cuda_graph_timeline.csv": {
        "timestamp_sec": 2,
        "uniform": 0,
        "has_lora": 0,
        "launch_us": 10,
        "dummy": 0,
        "worker": 0,
        "num_graphs": 1,
    },
    "gpu_memory.csv": {"timestamp_sec": 1, "gpu": 0, "utilization_pct": 50},
    "gpu_steps.csv": {"timestamp_sec": 1, "worker": 0, "encoder_items": 0, "encoder_us": 0},
    "moe_experts.csv": {"timestamp_sec": 2, "since_sec": 1, "worker": 0, "layer": 0},
    "moe_pairs.csv": {"timestamp_sec": 2, "worker": 0, "layer": 0},
}

METADATA: Mapping[str, Any] = {
    "format_version": 1,
    "session_id": "session_20260131_120000_4711_c0ffee",
    "started_at": "2026-01-31T12:00:00.000000Z",
    "ended_at": "2026-01-31T12:00:10.000000Z",
    "complete": True,
    "dropped_events": 0,
    "host": "gpu-1",
    "versions": {"profilemate": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0", "python": "3.11.9"},
    "processes": [
        {"pid": 7, "role": "engine", "rank": 0, "hooks": ["scheduler"], "hooks_missing": {}}
    ],
    "model": {"name": "tiny", "layers": 2, "dtype": "bfloat16", "bytes_per_token": 512},
    "cache": {
        "block_size": [16],
        "blocks": 101,
        "prefix_caching": True,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 1000,
        "tokens": 1616,
        "max_concurrency": 1.616,
    },
    "groups": [{"kind": "FullAttentionSpec", "block_size": 16}],
    "parallel": {"tensor": 1, "pipeline": 1, "data": 1},
    "cost": {"hook_sec": 0.25, "journal_bytes": 2048, "table_bytes": 0, "rows_dropped": 0},
}
"""A complete session of 10 s on an engine with 100 usable blocks of 16 tokens."""


_WORDS = {
    "event": "cache",
    "reason": "reallocated",
    "origin": "prompt",
    "kind": "first",
    "total_blocks": "3",
    "scheduled_tokens": "2",
    "other_expert": "2",
}


def sound_row(table: str) -> list[str]:
    """The cells of a row of a CSV table that has a 1 wherever that makes sense."""
    words = {**_WORDS, "kind": "capture"} if table == "cuda_graph_captures.csv" else _WORDS
    return [words.get(name, "1") for name in COLUMNS[table].split(",")]


class SessionBuilder:
    """A session's folder that rows are added to; ``folder`` is what the analyzer opens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.metadata()

    def metadata(self, **changes: Any) -> None:
        content = {**METADATA, **changes}
        (self.folder / "metadata.json").write_text(json.dumps(content))

    def rows(self, table: str, *rows: Mapping[str, Any]) -> None:
        """Append rows to a CSV table; the header comes with the first."""
        path = self.folder / table
        columns = COLUMNS[table].split(",")
        new = not path.exists()
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows({**DEFAULTS[table], **row} for row in rows)

    def usage(self, *points: tuple[float, int], **other: Any) -> None:
        """Rows of (time, blocks held) in a pool of 100, of which as many more are cached."""
        self.rows(
            "kv_cache_usage.csv",
            *(
                {
                    "timestamp_sec": time,
                    "usage_pct": f"{held:.2f}",
                    "num_blocks": held,
                    "total_blocks": 100,
                    "cached_blocks": min(held, 100 - held),
                    "free_blocks": 100 - held - min(held, 100 - held),
                    **other,
                }
                for time, held in points
            ),
        )

    def lookups(self, *rows: Mapping[str, Any]) -> None:
        self.rows("prefix_cache_lookups.csv", *rows)

    def evictions(self, *rows: Mapping[str, Any]) -> None:
        """Rows of blocks that lived at least as long as they were idle."""
        table = "kv_cache_evictions.csv"
        for row in rows:
            spans = [row.get(name) or 0 for name in ("idle_sec", "evictable_sec")]
            self.rows(table, {"lifetime_sec": max(1, *spans), "idle_sec": max(1, *spans), **row})

    def requests(self, *rows: Mapping[str, Any]) -> None:
        with open(self.folder / "requests.jsonl", "a") as file:
            file.writelines(
                json.dumps({"timestamp": 0, "hash_ids": [], "engine": 0, **row}) + "\n"
                for row in rows
            )

    def append(self, table: str, text: str) -> None:
        """Append raw text, as it is."""
        with open(self.folder / table, "a") as file:
            file.write(text)
