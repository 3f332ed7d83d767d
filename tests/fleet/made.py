# SPDX-License-Identifier: Apache-2.0
"""Sessions of a fleet that are made by hand, with their totals.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.analysis.builder import METADATA, SessionBuilder

TIMES_NS = [digit * 10**power for power in range(6, 15) for digit in (1, 2, 5)]
SCHEDULE_NS = [digit * 10**power for power in range(4, 10) for digit in (1, 2, 5)]
REUSES = [1, 2, 4, 8, 16, 32, 64]
BANDS = ("under_40", "from_40_to_60", "from_60_to_80", "from_80_to_90", "over_90")


def histogram(values: Sequence[int] = (), bounds: Sequence[int] = TIMES_NS) -> dict[str, Any]:
    """Of these values, one by one."""
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[sum(bound <= value for bound in bounds)] += 1
    return {
        "bounds": [*bounds],
        "counts": counts,
        "count": len(values),
        "sum": sum(values),
    }


def engine(
    *,
    prefix_cache: dict[str, int] | None = None,
    requests: dict[str, Any] | None = None,
    blocks: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An engine's totals: nothing has happened but what is given."""
    lookups = {"lookups": 0, "query_tokens": 0, "hit_tokens": 0}
    asked = ("requests", "requests_hit", "query_tokens", "hit_tokens")
    external = ("external_requests_hit", "external_hit_tokens")
    named = ("total", "held", "cached", "free", "peak_held", "regretted")
    steps = ("prefill", "mixed", "decode", "idle", "prefill_tokens", "decode_tokens")
    tokens = ("prompt_tokens", "output_tokens", "computed_tokens")
    return {
        "engine": 0,
        "lost": [],
        "pools": [
            {
                "pool": 0,
                **{f"{name}_blocks": 0 for name in named},
                "band_ns": dict.fromkeys(BANDS, 0),
                "resets": 0,
                "resets_refused": 0,
                "groups": [],
                "evictions": [],
                **(pool or {}),
            }
        ],
        "blocks": {
            **{name: histogram() for name in ("lifetime", "idle", "evictable", "reuse_gap")},
            "reuses": histogram(bounds=REUSES),
            **(blocks or {}),
        },
        "prefix_cache": {
            **dict.fromkeys((*asked, *external), 0),
            **dict.fromkeys(("fresh", "resumed", "skipped"), lookups),
            **(prefix_cache or {}),
        },
        "requests": {
            **dict.fromkeys(("arrived", "running", "waiting", "preemptions", *tokens), 0),
            "finished": {},
            **{name: histogram() for name in ("queue", "first_token", "duration")},
            **(requests or {}),
        },
        "steps": {
            **dict.fromkeys((*steps, "scheduled_requests"), 0),
            "schedule": histogram(bounds=SCHEDULE_NS),
        },
    }


def write_totals(folder: Path, engines: Sequence[dict[str, Any]], until_ns: int) -> None:
    """The file totals.json of a session that ended."""
    said = json.loads((folder / "metadata.json").read_text())
    content = {
        "format_version": 1,
        "session_id": said["session_id"],
        "started_at": said["started_at"] or "",
        "until_ns": until_ns,
        "ended": True,
        "versions": said["versions"],
        "peak_held_blocks": 0,
        "engines": [*engines],
        "workers": [],
        "gpus": [],
        "processes": [],
        "collector": {"lag_ns": None, "longest_lag_ns": None, "table_bytes": 0},
    }
    (folder / "totals.json").write_text(json.dumps(content))


def made(base: Path, name: str, *engines: dict[str, Any], **facts: Any) -> SessionBuilder:
    """A session of 10 s on a host of this name, where ``facts`` name no other."""
    builder = SessionBuilder(base / f"session_{name}")
    builder.metadata(**{"session_id": f"session_{name}", "host": name, **facts})
    write_totals(builder.folder, engines or [engine()], 10**10)
    return builder


def started(second: int) -> dict[str, str]:
    """When a session of 10 s began, as facts."""
    stamp = str(METADATA["started_at"])[:17]
    return {"started_at": f"{stamp}{second:02}.000000Z", "ended_at": f"{stamp}{second + 10:02}Z"}
