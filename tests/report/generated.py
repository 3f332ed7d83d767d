# SPDX-License-Identifier: Apache-2.0
"""A session as large as one likes, that looks like a busy engine's: the same one each time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.analysis.builder import SessionBuilder

BLOCKS = 2_000
BLOCK = 16
STEP_SEC = 0.025


def write(folder: Path, steps: int) -> SessionBuilder:
    """``steps`` steps of 25 ms, with four evictions each, and a request every other one."""
    session = SessionBuilder(folder)
    end = steps * STEP_SEC
    session.metadata(duration_sec=end, ended_at="2026-01-31T12:00:01.000000Z")
    draw = random.Random(0)
    session.rows("kv_cache_usage.csv", *_usage(steps, draw))
    session.rows("kv_cache_evictions.csv", *_evictions(steps, draw))
    session.rows("prefix_cache_lookups.csv", *_lookups(steps, draw))
    session.rows("scheduler_steps.csv", *_steps(steps, draw))
    with open(session.folder / "requests.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in _requests(steps, draw))
    return session


Row = dict[str, Any]


def _usage(steps: int, draw: random.Random) -> Iterator[Row]:
    for step in range(steps):
        held = draw.randint(0, BLOCKS)
        cached = draw.randint(0, BLOCKS - held)
        yield {
            "timestamp_sec": f"{step * STEP_SEC:.6f}",
            "usage_pct": f"{100 * held / BLOCKS:.2f}",
            "num_blocks": held,
            "total_blocks": BLOCKS,
            "cached_blocks": cached,
            "free_blocks": BLOCKS - held - cached,
            "running_reqs": draw.randint(0, 64),
            "waiting_reqs": draw.randint(0, 300),
        }


def _evictions(steps: int, draw: random.Random) -> Iterator[Row]:
    for number in range(4 * steps):
        lifetime = min(draw.expovariate(1 / 20) + 0.05, (number + 1) * STEP_SEC / 4)
        idle = lifetime * draw.random()
        yield {
            "timestamp_sec": f"{(number + 1) * STEP_SEC / 4:.6f}",
            "lifetime_sec": f"{lifetime:.6f}",
            "idle_sec": f"{idle:.6f}",
            "evictable_sec": f"{idle * draw.random():.6f}",
            "block_id": draw.randint(1, BLOCKS),
            "reuse_count": int(draw.random() < 0.2),
            "reason": "reallocated" if draw.random() < 0.999 else "explicit",
            "content_id": draw.getrandbits(53),
            "owner_request": f"request-{number // 40}",
            "evicting_request": f"request-{number // 40 + 9}",
        }


def _lookups(steps: int, draw: random.Random) -> Iterator[Row]:
    for number in range(steps // 2):
        query = draw.randint(1, 4_000)
        yield {
            "timestamp_sec": f"{2 * number * STEP_SEC:.6f}",
            "request_id": f"request-{number}",
            "query_tokens": query,
            "hit_tokens": draw.randint(0, (query - 1) // BLOCK) * BLOCK,
        }


def _steps(steps: int, draw: random.Random) -> Iterator[Row]:
    for step in range(steps):
        prefill, decode = max(1, draw.randint(0, 2_000)), draw.randint(0, 64)
        yield {
            "timestamp_sec": f"{step * STEP_SEC:.6f}",
            "step": step + 1,
            "running_reqs": 64,
            "waiting_reqs": 3,
            "scheduled_tokens": prefill + decode,
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "scheduled_reqs": decode + 1,
            "preempted_reqs": int(draw.random() < 0.001),
            "finished_reqs": 0,
            "schedule_us": 500,
        }


def _requests(steps: int, draw: random.Random) -> Iterator[Row]:
    for number in range(steps // 2):
        arrived = 2 * number * STEP_SEC
        blocks = draw.randint(1, 40)
        family = draw.randint(0, 50)
        yield {
            "timestamp": round(1e3 * arrived, 3),
            "input_length": blocks * BLOCK + draw.randint(0, BLOCK - 1),
            "output_length": 20,
            "hash_ids": [1_000_000 * family + depth for depth in range(blocks)],
            "block_size": BLOCK,
            "request_id": f"request-{number}",
            "engine": 0,
            "output_hash_ids": [],
            "hit_tokens": draw.randint(0, blocks) * BLOCK,
            "external_hit_tokens": 0,
            "preemptions": 0,
            "num_blocks": blocks,
            "queue_sec": round(draw.random(), 6),
            "first_token_sec": round(arrived + 1 + draw.random(), 6),
            "finish_sec": round(arrived + 2 + draw.random(), 6),
            "finish_reason": "stop",
            "prefix_ids": [],
            "lora": None,
            "tenant": None,
            "priority": 0,
            "computed_tokens": blocks * BLOCK,
        }
