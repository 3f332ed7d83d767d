# SPDX-License-Identifier: Apache-2.0
"""What recording adds is told from batches that ran in pairs, and only if it was at work."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import graph_replay
from benchmarks.result import BenchmarkError


def test_a_disturbed_pair_moves_neither_figure() -> None:
    off = [40_000, 44_000, 900_000, 42_000, 41_000]
    on = [60_000, 66_000, 62_000, 800_000, 60_000]
    times = graph_replay.added(off, on, 20)
    # The differences are 20, 22, -838, 758 and 19 µs of 20 executions.
    assert (times.added, times.off, times.floor) == pytest.approx((1.0, 2.1, 1.0))


def test_batches_have_to_be_in_pairs() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        graph_replay.added([1, 2], [1], 1)


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
