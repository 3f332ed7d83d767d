# SPDX-License-Identifier: Apache-2.0
"""Of each step the fastest time over all runs counts."""

from __future__ import annotations

import pytest

from benchmarks.lockstep import floor


def test_floor_takes_each_step_from_its_fastest_run() -> None:
    assert floor([[5, 1, 9], [2, 7, 9], [4, 4, 3]]) == 2 + 1 + 3


def test_runs_that_differ_in_steps_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        floor([[1, 2], [1]])
