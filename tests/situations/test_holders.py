# SPDX-License-Identifier: Apache-2.0
"""Who holds blocks, against the block tables of a scheduler that is stopped at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis import open_session
from analysis.pool import holders, pressure, usage
from analysis.tables import facts
from profilemate import collector
from tests.kv import workload
from tests.kv.recording import Clock, only_session, recorded
from tests.kv.workload import Driver, Setting, scheduler_for

aborts = st.builds(workload.Abort, st.integers(0, 7))


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    setting=st.builds(
        Setting,
        blocks=st.integers(8, 40),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([16, 48, 512]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
    ),
    operations=st.lists(
        st.one_of(workload.adds, workload.adds, workload.steps, aborts), min_size=8, max_size=30
    ),
    pinned=st.integers(0, 2),
)
def test_holders_are_those_of_the_block_tables(
    model: Path,
    hooks_on: None,
    tmp_path_factory: pytest.TempPathFactory,
    setting: Setting,
    operations: list[workload.Operation],
    pinned: int,
) -> None:
    """Blocks that somebody takes from the pool and forgets are the leak, exactly where no request
    shares blocks."""
    sessions, clock = tmp_path_factory.mktemp("session"), Clock()
    with recorded(sessions, clock) as oracle:
        driver = Driver(scheduler_for(model, setting), oracle, clock, setting)
        pool = driver.scheduler.kv_cache_manager.block_pool
        pool.get_new_blocks(pinned)
        for operation in operations:
            driver.do(operation)
        (manager,) = driver.scheduler.kv_cache_manager.coordinator.single_type_managers
        tables = {
            name: len(manager.req_to_blocks.get(name, ())) for name in driver.scheduler.requests
        }
        held = setting.blocks - 1 - pool.get_num_free_blocks()
        idle = not driver.scheduler.requests
    session = only_session(sessions)
    collector.finalize(session)
    opened = open_session(session)
    known = facts.read(opened)
    found = holders.measure(opened, known, usage.measure(opened), pressure.states(opened))
    if found is None:
        assert not oracle.steps
        return
    expected = {name: blocks for name, blocks in tables.items() if blocks}
    assert {holder.request_id: holder.blocks for holder in found.oldest} == expected
    assert found.held_blocks == held
    assert found.blocks == sum(expected.values())
    if not found.at_least and (idle or expected):
        assert found.leaked_blocks == pinned
    assert found.leaked_blocks <= pinned
