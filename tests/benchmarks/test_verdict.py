# SPDX-License-Identifier: Apache-2.0
"""What ``make bench`` says of a result: a regression has to show, and noise must not."""

from __future__ import annotations

import pytest

from benchmarks.result import Result, Target, middle, unmeasured, verdict

LOW = Target(1.5)
HIGH = Target(500.0, "higher")


def found(target: Target | None, *figures: float) -> Result:
    return middle("name", list(figures), "unit", target, "")


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        (found(LOW, 1.5), None, "met"),
        (found(LOW, 1.6), None, "missed"),
        (found(HIGH, 500.0), None, "met"),
        (found(HIGH, 499.0), None, "missed"),
        # By the median, wherever single measurements went.
        (found(LOW, 1.0, 1.4, 9.0), None, "met"),
        (found(LOW, 1.3, 1.4), found(LOW, 1.0, 1.2), "met, worse"),
        (found(LOW, 1.0, 1.2), found(LOW, 1.3, 1.4), "met, better"),
        (found(LOW, 1.2, 1.4), found(LOW, 1.0, 1.2), "met"),
        (found(LOW, 1.0, 1.4), found(LOW, 1.1, 1.2), "met"),
        (found(HIGH, 400.0), found(HIGH, 300.0), "missed, better"),
        (found(HIGH, 600.0), found(HIGH, 700.0), "met, worse"),
        # As good as the same, though every measurement gave just this.
        (found(LOW, 1.005), found(LOW, 1.0), "met"),
        (found(LOW, 1.02), found(LOW, 1.0), "met, worse"),
        (found(None, 9.0), found(None, 1.0), "for comparison"),
        (unmeasured("name", "no GPU", LOW), found(LOW, 1.0), "not measured"),
        (found(LOW, 1.0), unmeasured("name", "no GPU", LOW), "met"),
        # Figures of different units say nothing of each other.
        (middle("name", [1.4], "MB", LOW, ""), middle("name", [0.6], "MB/s", LOW, ""), "met"),
    ],
)
def test_verdict(now: Result, before: Result | None, said: str) -> None:
    assert verdict(now, before) == said


def test_middle_of_an_even_number() -> None:
    assert found(LOW, 4.0, 1.0, 2.0, 3.0).figure == 2.5


def test_json_and_back() -> None:
    for result in (found(LOW, 1.0, 2.0), found(None, 1.0), unmeasured("name", "why", HIGH)):
        assert Result.from_json(result.as_json()) == result
