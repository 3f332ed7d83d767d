# SPDX-License-Identifier: Apache-2.0
"""Blocks that vLLM has taken from a request and keeps until the steps in flight have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv import compare
from tests.kv.recording import Clock, Tables, make_tables, only_session, recorded
from tests.kv.workload import Abort, Add, Driver, Operation, Setting, Steps, scheduler_for

pytestmark = pytest.mark.usefixtures("hooks_on")

SHARED = 64
IN_FLIGHT = Setting(blocks=40, max_num_batched_tokens=512, asynchronous=True, parking=True, lag=1)


def run(model: Path, folder: Path, operations: list[Operation]) -> Tables:
    """Run with two steps in flight, and compare everything with the oracle."""
    clock = Clock()
    origin = clock.now
    with recorded(folder, clock) as oracle:
        driver = Driver(scheduler_for(model, IN_FLIGHT), oracle, clock, IN_FLIGHT)
        driver.run(operations)
        assert not driver.scheduler.deferred_frees
    tables = make_tables(only_session(folder), folder / "tables")
    compare.check_everything(tables, oracle, origin, IN_FLIGHT.block_size)
    return tables


def moves(tables: Tables, event: str) -> list[tuple[str, int]]:
    """Request and blocks of every row of this event."""
    rows = tables.rows("kv_cache_allocations.csv")
    return [(row["request_id"], row["num_blocks"]) for row in rows if row["event"] == event]


def test_parked_blocks_are_held_until_they_come_back(model: Path, tmp_path: Path) -> None:
    tables = run(model, tmp_path, [Add(0, SHARED, 16, 8), Steps(1), Abort(0)])
    held = [row["num_blocks"] for row in tables.rows("kv_cache_usage.csv")]
    # 80 tokens; aborted in flight, they stay held until the step's results came.
    assert held == [5, 5, 0]
    assert moves(tables, "free") == [("request 1", 5)]
    assert tables.requests()["request 1"]["num_blocks"] == 5


def test_the_last_to_let_go_is_named(model: Path, tmp_path: Path) -> None:
    """Two requests share four blocks and are aborted in flight, the one that took them up
    first: the other one's parked blocks are the last to come back."""
    both: list[Operation] = [Add(0, SHARED, 16, 8), Steps(2), Add(0, SHARED, 16, 8), Steps(2)]
    sweep: list[Operation] = [Steps(2), Add(1, 0, 500, 1), Steps(2), Add(1, 0, 500, 1)]
    tables = run(model, tmp_path, [*both, Abort(1), Abort(0), *sweep])
    assert moves(tables, "reuse") == [("request 2", 4)]
    freed = moves(tables, "free")
    assert freed[:2] == [("request 2", 2), ("request 1", 6)]
    blocks = {name: row["num_blocks"] for name, row in tables.requests().items()}
    assert (blocks["request 1"], blocks["request 2"]) == (6, 6)
    evicted = tables.rows("kv_cache_evictions.csv")
    shared = [row["owner_request"] for row in evicted if row["reuse_count"]]
    assert shared == ["request 1"] * 4


def test_one_of_two_holders_is_parked(model: Path, tmp_path: Path) -> None:
    """The other one ends as usual, and is then the last to hold the blocks that they shared."""
    both: list[Operation] = [Add(0, SHARED, 16, 4), Steps(2), Add(0, SHARED, 16, 8), Steps(2)]
    tables = run(model, tmp_path, [*both, Abort(1)])
    assert moves(tables, "reuse") == [("request 2", 4)]
    # 84 tokens, of which the last is not computed; 64 of them were shared.
    assert moves(tables, "free")[-1] == ("request 1", 6)
    assert tables.rows("kv_cache_usage.csv")[-1]["num_blocks"] == 0
