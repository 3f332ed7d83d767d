# SPDX-License-Identifier: Apache-2.0
"""Calls of allocate_slots are sorted by whether the pool is recorded and what they gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.parts import _Calls
from profilemate.hooks import instances


class _Pool:
    def get_new_blocks(self, num_blocks: int) -> list[int]:
        return list(range(num_blocks))


def manager(*, recorded: bool) -> Any:
    pool: Any = _Pool()
    if recorded:
        instances.hook(pool, "get_new_blocks", after=lambda *_: None)
    return SimpleNamespace(block_pool=pool)


def test_the_fastest_of_each_call_counts() -> None:
    calls = _Calls()
    blocks, none = SimpleNamespace(blocks=([1],)), SimpleNamespace(blocks=([],))
    runs = [manager(recorded=False), manager(recorded=True)]
    again = [manager(recorded=False), manager(recorded=True)]
    for known, times in zip([*runs, *again], [(5, 9), (7, 20), (6, 8), (8, 12)], strict=True):
        for taken, given in zip(times, (blocks, none), strict=True):
            calls.add(known, taken, given)
    assert calls.fastest(recorded=False) == [5, 8]
    assert calls.fastest(recorded=True) == [7, 12]
    assert calls.handed_out == [True, False]


def test_a_request_that_got_nothing_handed_out_none() -> None:
    calls = _Calls()
    calls.add(manager(recorded=True), 5, None)
    assert calls.handed_out == [False]
