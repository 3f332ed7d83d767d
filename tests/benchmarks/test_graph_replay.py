# SPDX-License-Identifier: Apache-2.0
"""What recording adds to a replay is said only if it was at work."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import graph_replay
from benchmarks.result import BenchmarkError


@pytest.mark.parametrize("pieces", [1, 3])
def test_every_execution_is_recorded(pieces: int) -> None:
    with graph_replay._sides(pieces, recorded=True) as (off, on):
        for runner in (off, on, on):
            runner.execute_model(scheduler_output=_Output())


def test_recording_that_stopped_is_no_measurement() -> None:
    sides = graph_replay._sides(2, recorded=True)
    _, on = sides.__enter__()
    on.execute_model(_Output())
    del on.execute_model
    on.execute_model(_Output())
    with pytest.raises(BenchmarkError, match=r"\(1, 2\) is recorded of \(2, 4\)"):
        sides.__exit__(None, None, None)


class _Output:
    total_num_scheduled_tokens: Any = 7
