# SPDX-License-Identifier: Apache-2.0
"""A group with a block pool of its own, and blocks that are let go elsewhere than by ``free``.

vLLM has both where a model keeps part of its cache in the host's memory (from 0.30).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profilemate.hooks.kv import watch
from tests.kv import compare
from tests.kv.recording import Clock, make_tables, only_session, recorded
from tests.kv.workload import Abort, Add, Driver, Operation, Setting, Steps, scheduler_for

pytestmark = pytest.mark.usefixtures("hooks_on")

SETTING = Setting(
    blocks=60, groups="window", max_num_batched_tokens=256, asynchronous=True, parking=True, lag=1
)
OWN_BLOCKS = 80


def with_second_pool(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler whose second group has a pool of its own, as host memory would be."""
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setenv("VLLM_PROFILING", "0")
    scheduler = scheduler_for(model, SETTING)
    group = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    group.block_pool = BlockPool(OWN_BLOCKS, True, SETTING.block_size)
    group._null_block = group.block_pool.null_block
    monkeypatch.setenv("VLLM_PROFILING", "1")
    watch.watch(scheduler)
    return scheduler


def test_two_pools(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool's blocks are counted in its own rows, also those that vLLM hands over to it."""
    operations: list[Operation] = []
    for family in range(40):
        operations += [Add(family % 3, 48, 30 + family, 12), Steps(2 + family % 3)]
        operations += [Abort(family)] * (family % 4 == 0)
    clock = Clock()
    origin = clock.now
    with recorded(tmp_path, clock) as oracle:
        scheduler = with_second_pool(model, monkeypatch)
        driver = Driver(scheduler, oracle, clock, SETTING)
        driver.run(operations)
        assert not scheduler.deferred_frees
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    assert [pool.num_gpu_blocks for pool in oracle.pools] == [60, 80]
    assert all(oracle.total(event, 1) for event in ("allocate", "reuse", "free", "cache"))
    compare.check_metadata(tables)
    compare.check_counts(tables, oracle)
    compare.check_usage_at(tables, oracle, origin)
    groups = {(row["pool"], row["group"]) for row in tables.rows("kv_cache_evictions.csv")}
    assert groups == {(0, 0), (1, 1)}


def test_unpinned_blocks(model: Path, tmp_path: Path) -> None:
    """Whoever let blocks go with ``unpin_blocks`` hears when vLLM hands them out again."""
    clock = Clock()
    reused: list[Any] = []
    setting = Setting(blocks=30, max_num_batched_tokens=512)
    with recorded(tmp_path, clock) as oracle:
        scheduler = scheduler_for(model, setting)
        driver = Driver(scheduler, oracle, clock, setting)
        pool = scheduler.kv_cache_manager.block_pool
        driver.run([Add(0, 0, 100, 2)])
        pinned = pool.get_new_blocks(20)
        driver.run([Add(1, 0, 40, 2)])
        walked = iter(pinned)
        pool.unpin_blocks(walked, reused.append)
        assert next(walked, None) is None
        driver.run([Add(2, 0, 460, 1)])
    assert len(reused) == 20
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    compare.check_metadata(tables)
    compare.check_counts(tables, oracle)
    compare.check_usage(tables, oracle)
    moves = tables.rows("kv_cache_allocations.csv")
    assert [row["num_blocks"] for row in moves if row["event"] == "free"] == [7, 3, 20, 29]
