# SPDX-License-Identifier: Apache-2.0
"""After a pause the analyzer says what it says of the same time of a recording without one, but for
what is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.errors import SessionError
from tests.analysis.test_segments import differences, said
from tests.kv.test_pausing import SETTING, Pair, pair
from tests.kv.workload import Operation, Steps, busy
from tests.situations.test_window import WITHOUT_HISTORY

pytestmark = pytest.mark.usefixtures("hooks_on")

OF_BLOCKS_THAT_WERE_THERE = (
    # Nothing says when they were handed out, nor how often they were reused.
    *(".lifetimes.lifetime.", ".lifetimes.idle.", ".lifetimes.evictable."),
    *(".ages.at_eviction.", ".ages.at_hit."),
    *(".evictions.by_origin.", ".evictions.reuse_counts[", ".evictions.total.never_reused"),
    *(
        f".evictions.by_{split}.never_reused"
        for split in (
            "reason.reallocated",
            "reason.explicit",
            "reason.reset",
            "engine.0",
            "group.0",
        )
    ),
)
OF_THE_RUN = (".run.", ".cost.", ".session.period")
# Idle steps of up to a second are one row, which has the time of the first.
OF_IDLE_STEPS = (".preemptions.steps", ".scheduling.idle_steps")
OF_REQUESTS_THAT_WERE_THERE = (
    # Nothing says what they lost before; and a waiting one may have been looked up before.
    *(".preemptions.", ".prefix_cache.repeated.", ".waiting."),
)


def recorded(model: Path, operations: list[Operation], switches: list[int], folder: Path) -> Pair:
    """A recording as a whole and one with pauses, of which something is left to compare."""
    both = pair(model, SETTING, operations, switches, folder)
    assert both.pauses
    return both


def unexpected(both: Pair, *known: str) -> list[str]:
    """What the last period says that differs from the same time of the whole."""
    # The step at whose end the recording goes on is not recorded.
    begin_sec = both.pauses[-1][1] / 1e6 + 1e-6
    whole = said(both.whole.folder, after_sec=begin_sec)
    found = said(both.paused.folder, after_sec=begin_sec)
    assert found["allocations"]["allocated"]["blocks"] > 100
    assert found["requests"]["ended"] > 10
    assert found["warnings"] == []
    return [each for each in differences(found, whole) if not each.startswith(known)]


def test_an_engine_that_was_idle_at_both_ends(model: Path, tmp_path: Path) -> None:
    drained = [*busy()[:-5], Steps(300), Steps(2)]
    operations = drained * 3
    switches = [len(drained) - 1, 2 * len(drained) - 1]
    both = recorded(model, operations, switches, tmp_path)
    known = (*WITHOUT_HISTORY, *OF_BLOCKS_THAT_WERE_THERE, *OF_THE_RUN, *OF_IDLE_STEPS)
    assert unexpected(both, *known) == []


def test_an_engine_in_the_midst_of_its_work(model: Path, tmp_path: Path) -> None:
    both = recorded(model, busy() * 3, [100, 140], tmp_path)
    known = (
        *WITHOUT_HISTORY,
        *OF_BLOCKS_THAT_WERE_THERE,
        *OF_THE_RUN,
        *OF_REQUESTS_THAT_WERE_THERE,
        *OF_IDLE_STEPS,
    )
    assert unexpected(both, *known) == []


def test_a_period_before_a_pause_is_the_beginning_of_the_run(model: Path, tmp_path: Path) -> None:
    """Whatever comes after the pause."""
    operations = busy() * 2
    both = recorded(model, operations, [200, 240], tmp_path)
    (tmp_path / "short").mkdir()
    short = recorded(model, operations[:240], [200], tmp_path / "short")
    assert short.pauses[0][0] == both.pauses[0][0]
    found, wanted = (said(each.paused.folder, period=1) for each in (both, short))
    known = (".run.", ".cost.", ".session.period.paused_sec", ".session.ended_at")
    assert [each for each in differences(found, wanted) if not each.startswith(known)] == []


def test_a_period_that_there_is_not(model: Path, tmp_path: Path) -> None:
    both = recorded(model, busy(), [20, 40], tmp_path)
    with pytest.raises(SessionError, match="there is no period 3; the recording has 1 to 2"):
        said(both.paused.folder, period=3)
    with pytest.raises(SessionError, match=r"there is no period 2; .* 1, as it was never paused"):
        said(both.whole.folder, period=2)
