# SPDX-License-Identifier: Apache-2.0
"""Rates of windows: by numbers by hand, and never negative whatever comes."""

from __future__ import annotations

import bisect
import math
from dataclasses import asdict, astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profilemate.format.totals import TIMES_NS
from profilemate.live.rates import (
    Cost,
    Graphs,
    History,
    Median,
    between,
    cost_between,
    graphs_between,
    imbalance_between,
    median,
    of_run,
    seconds_between,
)
from profilemate.live.reading import Counters, Look, Process, Worker
from tests.live.figures import SECOND, engine, histogram, look_at


def at(seconds: float, evictions: int) -> Look:
    """A look at an engine that has evicted so many blocks."""
    return look_at(seconds, engine(counters=Counters(evictions=evictions)))


def test_figures_of_a_window_by_hand() -> None:
    before = engine(
        counters=Counters(1000, 500, 40, 6, 30, 2, 20, 10, 100, 7, 700, 90),
        lifetime=histogram(at3=9),
        idle=histogram(at3=1),
    )
    after = engine(
        counters=Counters(1800, 700, 60, 11, 35, 4, 30, 15, 140, 9, 900, 290),
        lifetime=histogram(at3=9, at8=3, at9=2),
        idle=histogram(at3=1, at0=1),
    )
    found = between(look_at(100, before), look_at(110, after), 0)
    assert found is not None
    assert asdict(found) == {
        "seconds": 10.0,
        "hit_rate": 0.25,
        "prompt_tokens_per_sec": 80.0,
        "evictions_per_sec": 2.0,
        "regretted_per_sec": 0.5,
        "never_reused": 0.25,
        # Three of five values lie in bin 8, from 200 ms to 500 ms.
        "lifetime": {"from_sec": 0.2, "to_sec": 0.5},
        "idle": {"from_sec": 0.0, "to_sec": 0.001},
        "preemptions_per_sec": 0.2,
        "arrived_per_sec": 1.0,
        "ended_per_sec": 0.5,
        "steps_per_sec": 4.0,
        "prefill_tokens_per_sec": 20.0,
        "decode_tokens_per_sec": 20.0,
    }
    run = of_run(look_at(200, after), after)
    assert (run.seconds, run.hit_rate, run.evictions_per_sec) == (200.0, 700 / 1800, 0.3)
    assert run.lifetime == Median(0.005, 0.01)


def test_an_idle_window_has_no_shares_and_no_medians() -> None:
    found = between(at(100, 5), at(110, 5), 0)
    assert found is not None
    assert (found.evictions_per_sec, found.hit_rate, found.never_reused) == (0.0, None, None)
    assert (found.lifetime, found.idle) == (None, None)


def test_of_contents_from_before_a_pause_nobody_knows_whether_they_were_reused() -> None:
    after = engine(counters=Counters(evictions=50, never_reused=10, unknown_evictions=30))
    found = between(look_at(100, engine()), look_at(110, after), 0)
    assert found is not None
    assert (found.evictions_per_sec, found.never_reused) == (5.0, 0.5)


def test_an_engine_that_comes_in_the_window_counts_from_nothing() -> None:
    first, last = look_at(10), look_at(20, engine(), engine(1, counters=Counters(arrived=30)))
    found = between(first, last, 1)
    assert found is not None
    assert found.arrived_per_sec == 3.0
    assert between(first, last, 2) is None


def test_seconds_are_those_in_which_it_happened() -> None:
    first = look_at(100)
    # vLLM has nothing to do: its last event stays, and time goes on.
    assert seconds_between(first, replace(look_at(110), until_ns=first.until_ns)) == 10
    # The collector catches up: in a second it counts the events of a minute.
    ahead = replace(look_at(101), until_ns=160 * SECOND)
    assert seconds_between(first, ahead) == 60


def test_windows_are_10_s_and_a_minute() -> None:
    history = History()
    for second in range(100):
        history.add(at(second, second))
    (short, last), (long, also_last) = history.windows()
    assert last == also_last == at(99, 99)
    assert (short, long) == (at(89, 89), at(39, 39))
    assert len(history._looks) == 61


def test_a_short_history_is_one_window() -> None:
    history = History()
    assert history.windows() == []
    history.add(at(0, 0))
    assert history.windows() == []
    history.add(at(3, 6))
    assert history.windows() == [(at(0, 0), at(3, 6))]


def test_figures_that_were_not_written_anew_are_one_look() -> None:
    history = History()
    for look in (at(0, 0), at(1, 5), at(1, 5)):
        history.add(look)
    assert history.windows() == [(at(0, 0), at(1, 5))]


@pytest.mark.parametrize(
    "new",
    [
        at(6, 4),
        replace(at(6, 9), session_id="another"),
        replace(at(6, 9), until_ns=4 * SECOND),
        replace(at(6, 9), written_ns=at(4, 0).written_ns),
        replace(at(6, 9), engines=()),
        look_at(6, engine(counters=Counters(evictions=9), idle=histogram(at1=1))),
        replace(at(6, 9), workers=(Worker(0, 9, 8, 64, 48),)),
        replace(at(6, 9), processes=(Process("engine", 0, 0, 0, -1, 0),)),
    ],
)
def test_what_goes_back_begins_anew(new: Look) -> None:
    """Another collector counts anew, or another session has the name."""
    history = History()
    history.add(look_at(4, engine(counters=Counters(evictions=5), idle=histogram(at1=2))))
    history.add(look_at(5, engine(counters=Counters(evictions=5), idle=histogram(at1=2))))
    history.add(new)
    assert history.windows() == []


def test_graphs_by_hand() -> None:
    first = look_at(0, workers=(Worker(0, 10, 8, 64, 48),))
    last = look_at(10, workers=(Worker(0, 30, 18, 164, 128),))
    assert graphs_between(first, last, last.workers[0]) == Graphs(10.0, 20, 0.5, 0.2)
    assert graphs_between(None, last, last.workers[0]) == Graphs(10.0, 30, 0.6, 36 / 164)
    nothing = Worker(0, 0, 0, 0, 0)
    assert graphs_between(None, last, nothing) == Graphs(10.0, 0, None, None)


def test_experts_by_hand() -> None:
    first = look_at(0, workers=(Worker(0, 0, 0, 0, 0, {0: (10, 0), 1: (2, 2)}),))
    last = Worker(0, 0, 0, 0, 0, {0: (10, 6), 1: (5, 3), 2: (0, 0)})
    # Since then 0 and 6, and 3 and 1: the busiest have twice and one and a half times the mean.
    assert imbalance_between(first, last) == (2 + 1.5) / 2
    # In all 10 and 6, and 5 and 3.
    assert imbalance_between(None, last) == 1.25
    assert imbalance_between(first, first.workers[0]) is None
    assert imbalance_between(None, Worker(0, 9, 9, 9, 9)) is None


def test_cost_by_hand() -> None:
    first = look_at(0, processes=(Process("engine", 0, 0, 0, 10**6, 10**7),))
    spent = Process("engine", 0, 0, 0, 51 * 10**6, 110 * 10**6)
    assert cost_between(first, look_at(10, processes=(spent,)), spent) == Cost(0.5, 1.0)
    assert cost_between(first, look_at(10), Process("worker", 0, 0, 0, 5, 5)) is None
    assert cost_between(first, first, spent) is None


@given(st.lists(st.integers(0, 10**15), max_size=40))
def test_the_median_lies_in_its_bin(values: list[int]) -> None:
    counts = [0] * (len(TIMES_NS) + 1)
    for value in values:
        counts[bisect.bisect_right(TIMES_NS, value)] += 1
    found = median(counts, TIMES_NS)
    if not values:
        assert found is None
        return
    middle = sorted(values)[(len(values) - 1) // 2] / 1e9
    assert found is not None
    assert found.from_sec <= middle < (math.inf if found.to_sec is None else found.to_sec)


counters = st.builds(Counters, *[st.integers(0, 50)] * len(astuple(Counters())))
engines = st.builds(
    lambda rank, counts, bins: engine(
        rank, counters=counts, lifetime=histogram(at1=bins[0], at9=bins[1])
    ),
    st.integers(0, 2),
    counters,
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
looks = st.builds(
    lambda wall, until, found, work, hook: look_at(
        wall,
        *found,
        until_ns=until * SECOND,
        workers=(Worker(0, *sorted(work)),),
        processes=(Process("engine", 0, 0, 0, hook, hook),),
    ),
    st.integers(0, 90),
    st.integers(0, 90),
    st.lists(engines, max_size=3, unique_by=lambda each: each.engine),
    st.tuples(*[st.integers(0, 9)] * 4),
    st.integers(0, 9),
)


@given(st.lists(looks, max_size=12), st.booleans())
def test_no_rate_is_negative(seen: list[Look], in_order: bool) -> None:
    """Whatever collectors and clocks do, and sessions under the same name."""
    history = History()
    for look in sorted(seen, key=lambda each: each.written_ns) if in_order else seen:
        history.add(look)
        for first, last in history.windows():
            assert seconds_between(first, last) > 0
            for each in last.engines:
                found = between(first, last, each.engine)
                assert found is not None
                values = [value for value in asdict(found).values() if isinstance(value, float)]
                assert all(0 <= value < math.inf for value in values)
            graphs = graphs_between(first, last, last.workers[0])
            assert graphs.executions >= 0
            cost = cost_between(first, last, last.processes[0])
            assert cost is not None
            assert cost.hooks_pct >= 0
