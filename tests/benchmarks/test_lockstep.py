# SPDX-License-Identifier: Apache-2.0
"""Of each step the fastest time over all runs counts."""

from __future__ import annotations

import pytest

from benchmarks.lockstep import Times, floor
from benchmarks.scheduler_loop import describe


def test_floor_takes_each_step_from_its_fastest_run() -> None:
    assert floor([[5, 1, 9], [2, 7, 9], [4, 4, 3]]) == 2 + 1 + 3


def test_runs_that_differ_in_steps_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        floor([[1, 2], [1]])


def test_what_another_thread_takes_is_added() -> None:
    off = Times(steps=[[1_000, 3_000], [2_000, 2_000]], adds=[[500], [400]], beside=[0, 0])
    on = Times(steps=[[1_100, 2_500], [1_050, 2_400]], adds=[[600], [700]], beside=[90, 60, 500])
    whole, steps, note = describe(off, on)
    assert (whole, steps) == pytest.approx((100 * 540 / 3_000, 100 * 450 / 3_000))
    assert note == (
        "2 steps of 2 µs, +0.2 µs a step and 0.0 µs in another thread; add_request 0.4 µs, "
        "+0.2 µs a request"
    )
