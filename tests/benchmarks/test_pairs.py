# SPDX-License-Identifier: Apache-2.0
"""What is added is measured with batches that ran in pairs."""

from __future__ import annotations

import pytest

from benchmarks import pairs


def test_a_disturbed_pair_moves_neither_figure() -> None:
    off = [40_000, 44_000, 900_000, 42_000, 41_000]
    on = [60_000, 66_000, 62_000, 800_000, 60_000]
    times = pairs.added(off, on, 20)
    # The differences are 20, 22, -838, 758 and 19 µs of 20 executions.
    assert (times.added, times.off, times.floor) == pytest.approx((1.0, 2.1, 1.0))


def test_batches_have_to_be_in_pairs() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        pairs.added([1, 2], [1], 1)


def test_each_side_is_compared_with_the_first() -> None:
    ran: list[str] = []

    def side(name: str, nanoseconds: int) -> pairs.Timed:
        def timed() -> int:
            ran.append(name)
            return nanoseconds

        return timed

    sides = [side("bare", 10_000), side("floor", 12_000), side("hooked", 18_000)]
    floor, hooked = pairs.compare(sides, 7, 2, seed=1)
    assert (floor.added, hooked.added, hooked.off) == pytest.approx((1.0, 4.0, 5.0))
    assert {ran.count(name) for name in ("bare", "floor", "hooked")} == {7}
    assert ran != ["bare", "floor", "hooked"] * 7, "the order is drawn"
