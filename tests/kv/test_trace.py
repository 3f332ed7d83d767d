# SPDX-License-Identifier: Apache-2.0
"""A real workload through pools of several sizes: every number of the tables is the pool's own.

The trace is the head of Mooncake's conversation trace (tests/data), 3,000 requests. What each
pool does with it is known beforehand, so a mistake that the oracle shares would show, too.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.kv import compare
from tests.kv.recording import Clock, Tables, make_tables, only_session, recorded
from tests.support.oracle import Oracle
from tests.support.scheduler import RequestMaker, build_scheduler, drive, trace_requests

pytestmark = pytest.mark.usefixtures("hooks_on")

BLOCK = 16


@pytest.mark.parametrize(
    ("blocks", "allocated", "evicted", "reused"),
    [
        (1_000, 79_071, 75_245, 3_255),
        (2_000, 78_438, 73_612, 3_888),
        (16_000, 61_674, 42_848, 20_652),
    ],
)
def test_whole_trace(
    model: Path, tmp_path: Path, blocks: int, allocated: int, evicted: int, reused: int
) -> None:
    # Walking through the pool at every step would take longer than all the rest.
    with recorded(tmp_path, walk_every=blocks // 50) as oracle:
        drive(build_scheduler(model, blocks), trace_requests(RequestMaker()))
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    assert oracle.total("allocate") == allocated
    assert len(oracle.evictions) == evicted
    assert oracle.total("reuse") == reused
    compare.check_metadata(tables)
    compare.check_counts(tables, oracle)
    compare.check_usage(tables, oracle)
    compare.check_means(tables, oracle)
    compare.check_lookups(tables, oracle)
    compare.check_steps(tables, oracle)
    compare.check_requests(tables, oracle, BLOCK, caching=True)
    check_end(tables)
    check_tokens_without_preemption(tables)
    check_summary(tables, oracle)


def check_end(tables: Tables) -> None:
    """Nothing is held once everything has ended."""
    last = tables.rows("kv_cache_usage.csv")[-1]
    assert (last["num_blocks"], last["usage_pct"]) == (0, 0)
    assert (last["running_reqs"], last["waiting_reqs"]) == (0, 0)


def check_tokens_without_preemption(tables: Tables) -> None:
    """Every prompt token was computed or found, every output token but the first decoded."""
    steps = tables.rows("scheduler_steps.csv")
    requests = tables.requests().values()
    assert sum(row["preempted_reqs"] for row in steps) == 0
    found = sum(row["hit_tokens"] for row in requests)
    prompts = sum(row["input_length"] for row in requests)
    assert sum(row["prefill_tokens"] for row in steps) + found == prompts
    decoded = sum(row["output_length"] - 1 for row in requests)
    assert sum(row["decode_tokens"] for row in steps) == decoded


def check_summary(tables: Tables, oracle: Oracle) -> None:
    """kv_cache_summary.txt in the layout of docs/tables.md, with the oracle's numbers."""
    (pool,) = oracle.pools
    total = pool.num_gpu_blocks - 1
    peak = max(state.held for state in oracle.states)
    lines = (tables.folder / "kv_cache_summary.txt").read_text().splitlines()
    assert lines[:9] == [
        "KV Cache Statistics",
        "=" * 50,
        "",
        f"Total blocks available: {total}",
        f"Total allocations: {oracle.total('allocate')}",
        f"Total deallocations: {oracle.total('free')}",
        f"Peak blocks used: {peak}",
        f"Peak usage: {100 * peak / total:.2f}%",
        f"Total evictions: {len(oracle.evictions)}",
    ]
    rows = tables.rows("kv_cache_evictions.csv")
    for line, label, column in (
        (lines[9], "Avg block lifetime: ", "lifetime_sec"),
        (lines[10], "Avg idle before eviction: ", "idle_sec"),
    ):
        assert line.startswith(label)
        assert line.endswith("s")
        mean = sum(row[column] for row in rows) / len(rows)
        assert abs(float(line[len(label) : -1]) - mean) <= 0.0051


@pytest.mark.parametrize(
    ("blocks", "arguments"),
    [
        pytest.param(120, {"enable_prefix_caching": False}, id="prefix caching off"),
        pytest.param(120, {}, id="fcfs"),
        pytest.param(120, {"scheduling_policy": "priority"}, id="priority"),
        pytest.param(50, {"max_num_batched_tokens": 128}, id="chunked prefill"),
    ],
)
def test_preemption(model: Path, tmp_path: Path, blocks: int, arguments: dict[str, Any]) -> None:
    clock = Clock()
    origin = clock.now
    caching = bool(arguments.get("enable_prefix_caching", True))
    with recorded(tmp_path, clock) as oracle:
        scheduler = build_scheduler(model, blocks, max_model_len=1_024, **arguments)
        drive(scheduler, crowded(), step_ms=1, after_step=clock.tick)
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    compare.check_everything(tables, oracle, origin, BLOCK, caching=caching)
    check_end(tables)
    check_tokens_with_preemption(tables, oracle)


def crowded() -> list[tuple[float, Any]]:
    """Short requests of the trace, all at once, of three priorities."""
    short = trace_requests(RequestMaker(), max_model_len=500)
    requests = [request for _, request in islice(short, 300)]
    for index, request in enumerate(requests):
        request.priority = index * 7 % 3
    return [(0.0, request) for request in requests]


def check_tokens_with_preemption(tables: Tables, oracle: Oracle) -> None:
    """Prefill is what was there each time a request was admitted, less what was found then."""
    steps = tables.rows("scheduler_steps.csv")
    requests = tables.requests().values()
    preempted = sum(row["preempted_reqs"] for row in steps)
    assert preempted == sum(row["preemptions"] for row in requests) > 0
    assert preempted == sum(life.preemptions for life in oracle.lives.values())
    scheduled = sum(row["scheduled_tokens"] for row in steps)
    assert scheduled == sum(step.scheduled for step in oracle.steps)
    # What was computed for nothing comes on top of what the requests needed.
    needed = sum(row["input_length"] + row["output_length"] - 1 for row in requests)
    found = sum(lookup.hit for lookup in oracle.lookups if lookup.admitted)
    wasted = sum(life.wasted for life in oracle.lives.values())
    assert scheduled + found == needed + wasted
