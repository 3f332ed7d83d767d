# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from analysis import open_session
from analysis.pool import holders, pressure, usage
from analysis.pool.holders import Holder, Holders, Suspect
from analysis.tables import facts
from tests.analysis.builder import SessionBuilder


def holders_of(session: SessionBuilder, **options: Any) -> Holders | None:
    opened = open_session(session.folder)
    return holders.measure(
        opened, facts.read(opened), usage.measure(opened), pressure.states(opened), **options
    )


def move(time: float, event: str, request: str, blocks: int, **other: Any) -> dict[str, Any]:
    return {
        "timestamp_sec": time,
        "event": event,
        "request_id": request,
        "num_blocks": blocks,
        **other,
    }


def ended(request: str, time: float) -> dict[str, Any]:
    return {"request_id": request, "finish_sec": time}


def test_the_oldest_holders_and_their_ages(session: SessionBuilder) -> None:
    """At 10 s: old holds 3 + 2 blocks since 1 s; back was preempted at 5 s and holds what it got
    since 6 s; gone has ended; waits was preempted and holds nothing."""
    session.usage((1, 3), (9, 12))
    session.rows(
        "kv_cache_allocations.csv",
        move(1, "allocate", "old", 3),
        move(2, "allocate", "back", 4),
        move(3, "allocate", "gone", 9),
        move(4, "allocate", "waits", 2),
        move(4.5, "cache", "old", 3),
        move(5, "free", "back", 4),
        move(5, "free", "waits", 2),
        move(6, "reuse", "back", 4),
        move(7, "allocate", "back", 3),
        move(8, "free", "gone", 9),
        move(9, "allocate", "old", 2),
    )
    session.requests(ended("gone", 8))
    found = holders_of(session)
    assert found is not None
    assert found.oldest == (
        Holder("old", 0, 5, 0, since_sec=1, age_sec=9),
        Holder("back", 0, 7, 4, since_sec=6, age_sec=4),
    )
    assert (found.requests, found.blocks, found.held_blocks) == (2, 12, 12)
    assert (found.leaked_blocks, found.at_least, found.idle_sec) == (0, True, None)
    assert found.suspects == ()


def test_held_at_another_moment(session: SessionBuilder) -> None:
    session.usage((1, 5), (4, 0))
    session.rows("kv_cache_allocations.csv", move(1, "allocate", "r", 5), move(4, "free", "r", 5))
    session.requests(ended("r", 4))
    found = holders_of(session, at_sec=3)
    assert found is not None
    assert found.oldest == (Holder("r", 0, 5, 0, since_sec=1, age_sec=2),)
    later = holders_of(session)
    assert later is not None
    assert (later.held_blocks, later.oldest, later.leaked_blocks) == (0, (), 0)


def test_blocks_of_nobody_that_lives_are_a_leak(session: SessionBuilder) -> None:
    """lost ended at 3 s and four of its six blocks were freed; nothing runs from 5 s on."""
    session.usage((1, 6), (3, 2))
    session.usage((5, 2), running_reqs=0)
    session.usage((6, 2), running_reqs=0, waiting_reqs=0)
    session.rows(
        "kv_cache_allocations.csv",
        move(1, "allocate", "lost", 6),
        move(2, "allocate", "well", 3),
        move(3, "free", "lost", 4),
        move(5, "free", "well", 3),
    )
    session.requests(ended("lost", 3), ended("well", 5))
    found = holders_of(session)
    assert found is not None
    assert (found.held_blocks, found.leaked_blocks, found.at_least) == (2, 2, False)
    assert found.idle_sec == 5
    assert found.suspects == (Suspect("lost", 0, 2, 3),)


def test_an_engine_is_idle_only_with_all_the_others(session: SessionBuilder) -> None:
    """Engine 0 is idle from 4 s on with two blocks held; engine 1 from 7 s on with one."""
    for engine, since, held in ((0, 4, 2), (1, 7, 1)):
        session.usage((1, 9), engine=engine)
        session.usage((since, held), running_reqs=0, engine=engine)
    session.rows("kv_cache_allocations.csv", move(1, "allocate", "r", 9), move(4, "free", "r", 7))
    session.requests(ended("r", 4))
    found = holders_of(session)
    assert found is not None
    assert (found.held_blocks, found.leaked_blocks, found.idle_sec) == (3, 3, 3)
    before = holders_of(session, at_sec=5)
    assert before is not None
    assert (before.held_blocks, before.leaked_blocks, before.idle_sec) == (11, 0, None)


def test_a_leak_beside_requests_that_share_is_at_least_so_large(session: SessionBuilder) -> None:
    """20 are held; a and b have eight and seven, of which b took three up, maybe a's."""
    session.usage((1, 20), running_reqs=2)
    session.rows(
        "kv_cache_allocations.csv",
        move(1, "allocate", "a", 8),
        move(1, "reuse", "b", 3),
        move(1, "allocate", "b", 4),
    )
    found = holders_of(session)
    assert found is not None
    assert (found.leaked_blocks, found.at_least, found.idle_sec) == (5, True, None)


@pytest.mark.parametrize(
    "name",
    ["=1+1", "two\nlines", "-", 'a "b", c', "é\u2028", "\u3000\uff1d1", "\u202ex", "\u200b="],
)
def test_ids_are_found_as_the_tables_write_them(session: SessionBuilder, name: str) -> None:
    from profilemate.collector.tables import text_cell

    session.usage((1, 0))
    header = "timestamp_sec,event,num_blocks,request_id,evicted_blocks,step,engine,pool,group\n"
    session.append("kv_cache_allocations.csv", header)
    session.append("kv_cache_allocations.csv", f"1,allocate,3,{text_cell(name)},0,1,0,0,0\n")
    session.requests(ended(name, 2))
    found = holders_of(session)
    assert found is not None
    assert found.requests == 0


def test_other_groups_do_not_show_who_holds(session: SessionBuilder) -> None:
    session.usage((1, 20))
    session.metadata(groups=[{"kind": "SlidingWindowSpec", "block_size": 16}])
    assert holders_of(session) is None


def test_nothing_recorded_is_nothing_said(session: SessionBuilder) -> None:
    assert holders_of(session) is None
