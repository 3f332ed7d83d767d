# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, is aborted, preempted, reset or evicted: the tables say what happened."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings

from tests.kv import compare, workload
from tests.kv.recording import Clock, Tables, make_tables, only_session, recorded
from tests.kv.workload import (
    Add,
    Driver,
    Operation,
    Reset,
    Setting,
    Steps,
    scheduler_for,
)

pytestmark = pytest.mark.usefixtures("hooks_on")


examples = given(setting=workload.settings, operations=workload.operations)


@settings(max_examples=200)
@examples
@example(
    Setting(blocks=21, max_num_seqs=6, max_num_batched_tokens=48, policy="priority", lag=1),
    [Add(2, 32, 3, 4, 2), Steps(2), Add(2, 32, 3, 4, 2), Reset(running_too=True)],
).via("a new request shares the blocks that a resumed one got in the same step")
@example(
    Setting(blocks=21, max_num_seqs=6, max_num_batched_tokens=48, lag=1),
    [Add(0, 54, 34, 6), Steps(2), Reset(running_too=True)],
).via("the first token of a request is dropped")
@example(
    Setting(blocks=17, block_size=4, max_num_seqs=5, asynchronous=True, lag=2),
    [Add(0, 39, 20, 6)],
).via("a request ends by a step that was under way when it was preempted")
def test_full_attention(model: Path, setting: Setting, operations: list[Operation]) -> None:
    run(model, setting, operations)


@settings(max_examples=100)
@examples
def test_beside_sliding_windows(model: Path, setting: Setting, operations: list[Operation]) -> None:
    run(model, replace(setting, groups="window", blocks=3 * setting.blocks), operations)


@settings(max_examples=100)
@examples
@example(
    Setting(blocks=13, block_size=4, max_num_seqs=2, max_num_batched_tokens=48, policy="priority"),
    [Add(1, 38, 26, 18, 1), Add(1, 38, 26, 18, 1)],
).via("a request is preempted in the step in which it got a block of either group")
def test_beside_mamba_states(model: Path, setting: Setting, operations: list[Operation]) -> None:
    """Contents that end inside a block, copies on write, and contents that move."""
    run(model, replace(setting, groups="mamba"), operations)


@settings(max_examples=100)
@examples
def test_beside_mamba_checkpoints(
    model: Path, setting: Setting, operations: list[Operation]
) -> None:
    """Contents that vLLM drops from blocks that are held."""
    run(model, replace(setting, groups="checkpoints", blocks=setting.blocks // 2 + 4), operations)


def run(model: Path, setting: Setting, operations: list[Operation]) -> None:
    """Run the operations, and compare every column of every table with the oracle."""
    clock = Clock()
    origin = clock.now
    with tempfile.TemporaryDirectory() as folder:
        sessions = Path(folder)
        with recorded(sessions, clock) as oracle:
            driver = Driver(scheduler_for(model, setting), oracle, clock, setting)
            driver.run(operations)
        tables = make_tables(only_session(sessions), sessions / "tables")
        compare.check_everything(
            tables, oracle, origin, setting.block_size, caching=setting.caching
        )
        check_invariants(tables, setting)


def check_invariants(tables: Tables, setting: Setting) -> None:
    """What must hold of the tables alone, at every row."""
    total = setting.blocks - 1
    for row in tables.rows("kv_cache_usage.csv"):
        assert row["num_blocks"] + row["cached_blocks"] + row["free_blocks"] == total
    handed_out = let_go = made_reusable = destroyed = 0
    for row in tables.rows("kv_cache_allocations.csv"):
        handed_out += row["num_blocks"] * (row["event"] in ("allocate", "reuse"))
        let_go += row["num_blocks"] * (row["event"] == "free")
        made_reusable += row["num_blocks"] * (row["event"] == "cache")
        destroyed += row["evicted_blocks"]
        assert let_go <= handed_out
        assert destroyed <= made_reusable
    for row in tables.rows("kv_cache_evictions.csv"):
        assert 0 <= row["idle_sec"] <= row["lifetime_sec"] <= row["timestamp_sec"]
        assert (row["evictable_sec"] or 0) <= row["lifetime_sec"]
        assert 0 < row["block_id"] <= total
