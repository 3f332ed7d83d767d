# SPDX-License-Identifier: Apache-2.0
"""What totals.json should say, computed by polars from all rows of a session's tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from tests.analysis.builder import COLUMNS

Found = dict[str, Any]

TIMES = [digit * 10**power for power in range(6, 15) for digit in (1, 2, 5)]
SCHEDULE = [digit * 10**power for power in range(4, 10) for digit in (1, 2, 5)]
REUSES = [1, 2, 4, 8, 16, 32, 64]

_TEXT = frozenset(
    ("event", "request_id", "reason", "origin", "owner_request", "evicting_request", "kind")
)
_MOVES = {
    "allocate": "allocated_blocks",
    "reuse": "reused_blocks",
    "cache": "cached_blocks",
    "free": "freed_blocks",
}
_BANDS = {
    "under_40": pl.col("usage_pct") < 40,
    "from_40_to_60": (pl.col("usage_pct") >= 40) & (pl.col("usage_pct") < 60),
    "from_60_to_80": (pl.col("usage_pct") >= 60) & (pl.col("usage_pct") < 80),
    "from_80_to_90": (pl.col("usage_pct") >= 80) & (pl.col("usage_pct") <= 90),
    "over_90": pl.col("usage_pct") > 90,
}


def totals(folder: Path) -> Found:
    """totals.json."""
    found: Found = json.loads((folder / "totals.json").read_bytes())
    return found


def check(
    folder: Path, reuse_gaps: Sequence[int], arrived: int, preempted: int, regretted: Sequence[int]
) -> None:
    """Every figure of a session of one engine, whose clock moves by whole microseconds.

    ``reuse_gaps`` (nanoseconds), ``arrived``, ``preempted`` and ``regretted`` by pool were counted
    inside vLLM: no table has them.
    """
    found = totals(folder)
    metadata = json.loads((folder / "metadata.json").read_bytes())
    (engine,) = found["engines"]
    assert found["until_ns"] == round(metadata["duration_sec"] * 1e6) * 1_000
    assert (found["format_version"], found["ended"]) == (1, metadata["ended_at"] is not None)
    for key in ("session_id", "started_at", "versions"):
        assert found[key] == metadata[key]
    assert (found["workers"], found["gpus"]) == ([], [])
    assert (engine["engine"], engine["lost"]) == (0, [])
    usage = _table(folder, "kv_cache_usage.csv")
    assert engine["pools"] == [
        _pool(folder, usage.filter(pl.col("pool") == number), number, found["until_ns"])
        | {"regretted_blocks": regretted[number]}
        for number in range(len(engine["pools"]))
    ]
    counted = [pool["regretted_blocks"] for pool in engine["pools"]]
    assert counted == list(regretted)
    assert found["peak_held_blocks"] == _peak(usage)
    assert engine["blocks"] == _blocks(folder, reuse_gaps)
    assert engine["prefix_cache"] == _prefix_cache(folder)
    assert engine["requests"] == {
        **_requests(folder),
        **_running(folder, usage),
        "arrived": arrived,
        "preemptions": preempted,
    }
    assert engine["steps"] == _steps(folder)
    check_cost(found, metadata)


def check_cost(found: Found, metadata: Found) -> None:
    """What recording cost is what metadata.json says."""
    processes, cost = found["processes"], metadata["cost"]
    for process, known in zip(processes, metadata["processes"], strict=True):
        for key in ("role", "rank", "mismatches"):
            assert process[key] == known[key]
    for key, seconds in (("hook_ns", "hook_sec"), ("writing_ns", "writing_sec")):
        assert sum(process[key] for process in processes) / 1e9 == cost[seconds]
    for key in ("writes", "journal_bytes"):
        assert sum(process[key] for process in processes) == cost[key]
    dropped = sum(process["dropped_events"] for process in processes)
    assert dropped == metadata["dropped_events"]
    assert found["collector"]["table_bytes"] == cost["table_bytes"]
    lag = found["collector"]["longest_lag_ns"]
    assert (lag and lag / 1e9) == cost["collector_lag_sec"]


def histogram(values: Iterable[int], bounds: Sequence[int]) -> Found:
    """Counted by comparing each value with each bound."""
    column = pl.Series([*values], dtype=pl.Int64)
    below = [0, *(int((column < bound).sum()) for bound in bounds), len(column)]
    return {
        "bounds": list(bounds),
        "counts": [count - before for before, count in pairwise(below)],
        "count": len(column),
        "sum": sum(column.to_list()),
    }


def _table(folder: Path, name: str) -> pl.DataFrame:
    """All rows of a CSV table, empty cells as nulls; no row where there is none."""
    columns = COLUMNS[name].split(",")
    schema = {
        column: pl.String
        if column in _TEXT
        else pl.Float64
        if column.endswith(("_sec", "_pct"))
        else pl.Int64
        for column in columns
    }
    path = folder / name
    return pl.read_csv(path, schema=schema) if path.exists() else pl.DataFrame(schema=schema)


def _ns(seconds: pl.Series) -> pl.Series:
    """Decimals of a table, which are whole microseconds."""
    return (seconds.cast(pl.Float64) * 1e6).round().cast(pl.Int64) * 1_000


def _pool(folder: Path, usage: pl.DataFrame, number: int, until_ns: int) -> Found:
    moves = _table(folder, "kv_cache_allocations.csv").filter(pl.col("pool") == number)
    times = _ns(usage["timestamp_sec"])
    held_for = pl.Series([*times[1:], until_ns], dtype=pl.Int64) - times
    last = usage.row(-1, named=True)
    return {
        "pool": number,
        "total_blocks": last["total_blocks"],
        "held_blocks": last["num_blocks"],
        "cached_blocks": last["cached_blocks"],
        "free_blocks": last["free_blocks"],
        "peak_held_blocks": usage["num_blocks"].max(),
        "band_ns": {
            band: int(held_for.filter(usage.select(inside).to_series()).sum())
            for band, inside in _BANDS.items()
        },
        "resets": _events(moves, "reset").height,
        "resets_refused": _events(moves, "reset_refused").height,
        "groups": [
            {
                "group": group,
                **{
                    key: int(
                        _events(moves.filter(pl.col("group") == group), event)["num_blocks"].sum()
                    )
                    for event, key in _MOVES.items()
                },
            }
            for group in sorted(moves["group"].drop_nulls().unique())
        ],
        "evictions": _evictions(_table(folder, "kv_cache_evictions.csv"), number),
    }


def _events(moves: pl.DataFrame, event: str) -> pl.DataFrame:
    return moves.filter(pl.col("event") == event)


def _evictions(rows: pl.DataFrame, number: int) -> list[Found]:
    keys = ["group", "reason", "origin"]
    return (
        rows.filter(pl.col("pool") == number)
        .group_by(keys)
        .agg(
            blocks=pl.len().cast(pl.Int64),
            never_reused=(pl.col("reuse_count") == 0).sum().cast(pl.Int64),
            copies_left=(pl.col("copies_left") > 0).sum().cast(pl.Int64),
        )
        .sort(keys)
        .to_dicts()
    )


def _peak(usage: pl.DataFrame) -> int:
    """The most of all pools together, row by row."""
    held: dict[int, int] = {}
    peak = 0
    for pool, blocks in usage.select("pool", "num_blocks").iter_rows():
        held[pool] = blocks
        peak = max(peak, sum(held.values()))
    return peak


def _blocks(folder: Path, reuse_gaps: Sequence[int]) -> Found:
    rows = _table(folder, "kv_cache_evictions.csv")
    times = {
        name: _ns(rows[f"{name}_sec"]).drop_nulls() for name in ("lifetime", "idle", "evictable")
    }
    return {
        **{name: histogram(values, TIMES) for name, values in times.items()},
        "reuse_gap": histogram(reuse_gaps, TIMES),
        "reuses": histogram(rows["reuse_count"], REUSES),
    }


def _prefix_cache(folder: Path) -> Found:
    rows = _table(folder, "prefix_cache_lookups.csv")
    fresh = rows.filter(pl.col("kind").is_in(["first", "retry"]))
    once = fresh.filter(pl.col("admitted") == 1).unique("request_id", keep="last")
    return {
        "requests": once.height,
        "requests_hit": int((once["hit_tokens"] > 0).sum()),
        "query_tokens": int(once["query_tokens"].sum()),
        "hit_tokens": int(once["hit_tokens"].sum()),
        "external_requests_hit": int((once["external_hit_tokens"] > 0).sum()),
        "external_hit_tokens": int(once["external_hit_tokens"].sum()),
        "fresh": _lookups(fresh),
        "resumed": _lookups(rows.filter(pl.col("kind") == "resumed")),
        "skipped": _lookups(rows.filter(pl.col("kind") == "skipped")),
    }


def _lookups(rows: pl.DataFrame) -> Found:
    return {
        "lookups": int(rows["lookups"].sum()),
        "query_tokens": int((rows["query_tokens"] * rows["lookups"]).sum()),
        "hit_tokens": int((rows["hit_tokens"] * rows["lookups"]).sum()),
    }


def _requests(folder: Path) -> Found:
    path = folder / "requests.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    micros = [round(row["timestamp"] * 1e3) for row in rows]
    reasons = [row["finish_reason"] for row in rows]
    return {
        "finished": {reason: reasons.count(reason) for reason in sorted({*reasons})},
        "prompt_tokens": sum(row["input_length"] for row in rows),
        "output_tokens": sum(row["output_length"] for row in rows),
        "computed_tokens": sum(row["computed_tokens"] for row in rows),
        "queue": histogram(
            [round(row["queue_sec"] * 1e6) * 1_000 for row in rows if row["queue_sec"] is not None],
            TIMES,
        ),
        "first_token": histogram(
            [
                (round(row["first_token_sec"] * 1e6) - arrived) * 1_000
                for row, arrived in zip(rows, micros, strict=True)
                if row["first_token_sec"] is not None
            ],
            TIMES,
        ),
        "duration": histogram(
            [
                (round(row["finish_sec"] * 1e6) - arrived) * 1_000
                for row, arrived in zip(rows, micros, strict=True)
            ],
            TIMES,
        ),
    }


def _running(folder: Path, usage: pl.DataFrame) -> Found:
    """As the last row says, of whichever table came last."""
    steps = _table(folder, "scheduler_steps.csv").select("timestamp_sec", *_COUNTS)
    rows = [*steps.tail(1).rows(), *usage.select("timestamp_sec", *_COUNTS).tail(1).rows()]
    _, running, waiting = max(rows, key=lambda row: row[0])
    return {"running": running, "waiting": waiting}


_COUNTS = ("running_reqs", "waiting_reqs")


def _steps(folder: Path) -> Found:
    rows = _table(folder, "scheduler_steps.csv")
    busy = rows.filter(pl.col("scheduled_tokens") > 0)
    prompts, answers = busy["prefill_tokens"] > 0, busy["decode_tokens"] > 0
    return {
        "prefill": int((prompts & ~answers).sum()),
        "mixed": int((prompts & answers).sum()),
        "decode": int((answers & ~prompts).sum()),
        "idle": int(rows.filter(pl.col("scheduled_tokens") == 0)["repeats"].sum()),
        "prefill_tokens": int(busy["prefill_tokens"].sum()),
        "decode_tokens": int(busy["decode_tokens"].sum()),
        "scheduled_requests": int(busy["scheduled_reqs"].sum()),
        "schedule": histogram([micros * 1_000 for micros in busy["schedule_us"]], SCHEDULE),
    }
