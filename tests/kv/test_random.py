# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, is aborted, preempted, reset or evicted: the tables say what happened."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.kv import compare, workload
from tests.kv.recording import Clock, Tables, make_tables, only_session, recorded
from tests.kv.workload import Driver, Operation, Setting, scheduler_for

pytestmark = pytest.mark.usefixtures("hooks_on")


@settings(max_examples=250)
@given(setting=workload.settings, operations=workload.operations)
def test_full_attention(model: Path, setting: Setting, operations: list[Operation]) -> None:
    run(model, setting, operations)


@settings(max_examples=120)
@given(setting=workload.settings, operations=workload.operations)
def test_beside_sliding_windows(model: Path, setting: Setting, operations: list[Operation]) -> None:
    run(model, replace(setting, groups="window", blocks=3 * setting.blocks), operations)


@settings(max_examples=120)
@given(setting=workload.settings, operations=workload.operations)
def test_beside_mamba_states(model: Path, setting: Setting, operations: list[Operation]) -> None:
    """Contents that end inside a block, copies on write, and contents that move."""
    run(model, replace(setting, groups="mamba"), operations)


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
