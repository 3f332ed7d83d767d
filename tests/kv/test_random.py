# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, is aborted, preempted, reset or evicted: the tables say what happened."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv import compare, workload
from tests.kv.recording import Clock, Tables, make_tables, only_session, recorded
from tests.kv.workload import Driver, Operation, Setting, scheduler_for
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("hooks_on")

# The fixtures are made once and nothing of an example stays in them; starting vLLM's logging
# or a slow neighbour must not fail a test.
lenient = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@lenient
@given(setting=workload.settings, operations=workload.operations)
def test_tables_equal_the_oracle(
    model: Path, setting: Setting, operations: list[Operation]
) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        sessions = Path(folder)
        origin = clock.now
        with recorded(sessions, clock) as oracle:
            driver = Driver(scheduler_for(model, setting), oracle, clock, setting)
            driver.run(operations)
        tables = make_tables(only_session(sessions), sessions / "tables")
        compare.check_everything(
            tables, oracle, origin, setting.block_size, caching=setting.caching
        )
