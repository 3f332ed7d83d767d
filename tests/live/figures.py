# SPDX-License-Identifier: Apache-2.0
"""Looks and totals.json with figures that a test names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profilemate.format.totals import SCHEDULE_NS, TIMES_NS
from profilemate.live.reading import Counters, Engine, Gpu, Histogram, Look, Pool, Process, Worker

SECOND = 1_000_000_000


def histogram(**counts: int) -> Histogram:
    """So many values in these bins: ``at5=2`` are two values in the bin of number 5."""
    found = [0] * (len(TIMES_NS) + 1)
    for name, count in counts.items():
        found[int(name.removeprefix("at"))] = count
    return Histogram(TIMES_NS, tuple(found))


def engine(rank: int = 0, **figures: Any) -> Engine:
    """An engine with one pool of 100 blocks."""
    known: dict[str, Any] = {
        "engine": rank,
        "lost": (),
        "pools": (Pool(0, 100, 40, 25, 35, 60),),
        "running": 3,
        "waiting": 2,
        "counters": Counters(),
        "lifetime": histogram(),
        "idle": histogram(),
    }
    return Engine(**(known | figures))


def look_at(seconds: float, *engines: Engine, **figures: Any) -> Look:
    """A look so long after the session began, when it was written, too."""
    known: dict[str, Any] = {
        "session_id": "session_x",
        "written_ns": 1_700_000_000 * SECOND + round(seconds * SECOND),
        "until_ns": round(seconds * SECOND),
        "ended": False,
        "versions": {"vllm": "0.32.0"},
        "engines": engines or (engine(),),
        "workers": (Worker(0, 10, 8, 64, 48),),
        "gpus": (Gpu(0, 3 << 30, 1 << 30, 87),),
        "processes": (Process("engine", 0, 0, 0, 0, 0),),
        "lag_ns": SECOND // 2,
        "longest_lag_ns": 2 * SECOND,
    }
    return Look(**(known | figures))


def totals(**changes: Any) -> dict[str, Any]:
    """The content of a totals.json with a figure of its own in each place that is read."""
    times = {"bounds": list(TIMES_NS), "counts": [0] * (len(TIMES_NS) + 1), "count": 0, "sum": 0}
    lifetime = {**times, "counts": [*range(1, len(TIMES_NS) + 2)]}
    idle = {**times, "counts": [*range(101, len(TIMES_NS) + 102)]}
    lookups = {"lookups": 1, "query_tokens": 2, "hit_tokens": 3}
    schedule = {**times, "bounds": list(SCHEDULE_NS), "counts": [0] * (len(SCHEDULE_NS) + 1)}
    evictions = {"group": 0, "reason": "reallocated", "origin": "prompt", "copies_left": 0}
    found: dict[str, Any] = {
        "format_version": 1,
        "session_id": "session_x",
        "started_at": "2026-01-31T12:00:00+00:00",
        "until_ns": 90 * SECOND,
        "ended": False,
        "versions": {"vllm": "0.32.0"},
        "peak_held_blocks": 77,
        "engines": [
            {
                "engine": 4,
                "lost": ["frees"],
                "pools": [
                    {
                        "pool": 0,
                        "total_blocks": 100,
                        "held_blocks": 40,
                        "cached_blocks": 25,
                        "free_blocks": 35,
                        "peak_held_blocks": 60,
                        "band_ns": {},
                        "regretted_blocks": 5,
                        "resets": 0,
                        "resets_refused": 0,
                        "groups": [],
                        "evictions": [
                            {**evictions, "blocks": 20, "never_reused": 7},
                            {**evictions, "blocks": 3, "never_reused": 1, "reason": "reset"},
                            {**evictions, "blocks": 4, "never_reused": 0, "origin": "unknown"},
                        ],
                    }
                ],
                "blocks": dict.fromkeys(("evictable", "reuse_gap", "reuses"), times)
                | {"lifetime": lifetime, "idle": idle, "reuses": {**times, "count": 23}},
                "prefix_cache": {
                    "requests": 11,
                    "requests_hit": 12,
                    "query_tokens": 1300,
                    "hit_tokens": 650,
                    "external_requests_hit": 0,
                    "external_hit_tokens": 0,
                    "fresh": lookups,
                    "resumed": lookups,
                    "skipped": lookups,
                },
                "requests": {
                    "arrived": 15,
                    "running": 5,
                    "waiting": 6,
                    "preemptions": 16,
                    "finished": {"stop": 2, "length": 30},
                    "prompt_tokens": 0,
                    "output_tokens": 0,
                    "computed_tokens": 0,
                    **dict.fromkeys(("queue", "first_token", "duration"), times),
                },
                "steps": {
                    "prefill": 1,
                    "mixed": 20,
                    "decode": 300,
                    "idle": 18,
                    "prefill_tokens": 19,
                    "decode_tokens": 21,
                    "scheduled_requests": 22,
                    "schedule": schedule,
                },
            }
        ],
        "workers": [
            {
                "worker": 2,
                "executions": [
                    executions("FULL", 30, 480, 420, in_graph=True),
                    executions("PIECEWISE", 10, 160, 140, in_graph=True),
                    executions("NONE", 60, 5000, 5000, in_graph=False),
                    executions("FULL", 900, 9000, 900, in_graph=True, dummy=True),
                ],
                "replays": [],
            }
        ],
        "gpus": [
            {
                "gpu": 3,
                "sampled_sec": 1.5,
                "used_bytes": 3 << 30,
                "free_bytes": 1 << 30,
                "utilization_pct": None,
            }
        ],
        "processes": [
            {
                "role": "engine",
                "rank": 4,
                "dropped_events": 23,
                "mismatches": 24,
                "hook_ns": 25,
                "writing_ns": 26,
                "writes": 27,
                "journal_bytes": 28,
            }
        ],
        "collector": {"lag_ns": 29, "longest_lag_ns": 30, "table_bytes": 31},
    }
    return found | changes


def executions(
    mode: str, count: int, padded: int, unpadded: int, *, in_graph: bool, dummy: bool = False
) -> dict[str, Any]:
    """So many executions that are alike."""
    return {
        "mode": mode,
        "in_graph": in_graph,
        "dummy": dummy,
        "executions": count,
        "padded_tokens": padded,
        "unpadded_tokens": unpadded,
    }


def write(folder: Path, content: Mapping[str, Any], written: float | None = None) -> Path:
    """A session's folder with this totals.json, written at this time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "totals.json"
    path.write_text(json.dumps(content))
    if written is not None:
        os.utime(path, (written, written))
    return folder
