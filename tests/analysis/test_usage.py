# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import open_session
from analysis.pool.usage import PoolUsage, Usage, measure
from tests.analysis.builder import SessionBuilder


def usage_of(session: SessionBuilder) -> Usage:
    return measure(open_session(session.folder))


def combined_of(session: SessionBuilder) -> PoolUsage:
    combined = usage_of(session).combined
    assert combined is not None
    return combined


def test_each_row_counts_for_as_long_as_it_held(session: SessionBuilder) -> None:
    # 1 s at 0 %, 2 s at 50 %, 1 s at 95 %, 3 s at 30 %, and 0 % for the 2 s to the end at 10 s.
    session.usage((1, 0), (2, 50), (4, 95), (5, 30), (8, 0))
    usage = combined_of(session)
    assert usage.observed_sec == 9
    assert usage.mean_pct == pytest.approx((2 * 50 + 95 + 3 * 30) / 9)
    assert usage.p50_pct == 30
    assert usage.p95_pct == 95
    assert usage.peak_pct == 95
    assert usage.held_share == pytest.approx(6 / 9)
    assert usage.mean_while_held_pct == pytest.approx((2 * 50 + 95 + 3 * 30) / 6)


def test_peak_and_end_say_what_the_blocks_were(session: SessionBuilder) -> None:
    session.usage((1, 0), (2, 70), (3, 90), (4, 90), (5, 10))
    usage = combined_of(session)
    peak, end = usage.peak, usage.end
    assert (peak.timestamp_sec, peak.held_blocks, peak.cached_blocks, peak.free_blocks) == (
        3,
        90,
        10,
        0,
    )
    assert (end.timestamp_sec, end.held_blocks, end.cached_blocks, end.free_blocks) == (
        5,
        10,
        10,
        80,
    )
    assert end.total_blocks == 100


def test_bands_begin_at_their_lower_bound_and_90_is_not_over_90(session: SessionBuilder) -> None:
    levels = [(39.99, 1), (40, 2), (59.99, 3), (60, 4), (79.99, 5), (80, 6), (90, 7), (90.01, 8)]
    time = 0.0
    for level, duration in levels:
        session.usage((time, 1), usage_pct=level)
        time += duration
    session.metadata(ended_at="2026-01-31T12:00:36Z")
    bands = combined_of(session).bands
    assert bands is not None
    seconds = [
        round(36 * share)
        for share in (
            bands.under_40,
            bands.from_40_to_60,
            bands.from_60_to_80,
            bands.from_80_to_90,
            bands.over_90,
        )
    ]
    assert seconds == [1, 2 + 3, 4 + 5, 6 + 7, 8]


def test_engines_are_shown_apart_and_together(session: SessionBuilder) -> None:
    # Engine 0 from 0 to 10 s: 4 s at 100 %, 6 s at 0 %. Engine 1 from 5 s: 5 s at 40 %.
    session.usage((0, 100))
    session.usage((5, 40), engine=1)
    session.usage((4, 0))
    usage = usage_of(session)
    first, second = usage.pools
    assert (first.engine, first.observed_sec, first.mean_pct) == (0, 10, 40)
    assert (second.engine, second.observed_sec, second.mean_pct) == (1, 5, 40)
    assert (first.peak_pct, second.peak_pct) == (100, 40)
    both = usage.combined
    assert both is not None
    assert both.observed_sec == 15
    assert both.mean_pct == pytest.approx((4 * 100 + 5 * 40) / 15)
    assert both.p50_pct == 40
    assert (both.peak.engine, both.peak.held_blocks) == (0, 100)
    assert (both.end.held_blocks, both.end.total_blocks, both.end.usage_pct) == (40, 200, 20)


def test_pools_of_an_engine_are_shown_apart(session: SessionBuilder) -> None:
    session.usage((0, 10), pool=0)
    session.usage((0, 80), pool=1)
    assert [(usage.pool, usage.mean_pct) for usage in usage_of(session).pools] == [(0, 10), (1, 80)]


def test_no_row_means_no_usage(session: SessionBuilder) -> None:
    assert usage_of(session) == Usage(None, ())


def test_no_time_means_no_average(session: SessionBuilder) -> None:
    session.usage((10, 50))
    usage = combined_of(session)
    assert usage.peak_pct == 50
    averages = (usage.mean_pct, usage.p50_pct, usage.bands, usage.held_share)
    assert averages == (None, None, None, None)


times = st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True).map(sorted)
histories = times.flatmap(
    lambda moments: st.tuples(
        st.just(moments),
        st.lists(st.integers(0, 100), min_size=len(moments), max_size=len(moments)),
    )
)


@settings(max_examples=60, deadline=None)
@given(
    histories=st.lists(histories, min_size=1, max_size=3),
    end=st.integers(20, 25),
    chunk=st.integers(1, 300),
)
def test_weighting_is_that_of_looking_every_second(
    tmp_path_factory: pytest.TempPathFactory,
    histories: list[tuple[list[int], list[int]]],
    end: int,
    chunk: int,
) -> None:
    session = SessionBuilder(tmp_path_factory.mktemp("session"))
    session.metadata(ended_at=f"2026-01-31T12:00:{end}Z")
    changes = sorted(
        (moment, engine, held)
        for engine, (moments, blocks) in enumerate(histories)
        for moment, held in zip(moments, blocks, strict=True)
    )
    for moment, engine, held in changes:
        session.usage((moment, held), engine=engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.tables.reading._CHUNK", chunk)
        usage = usage_of(session)
    looks: list[int] = []
    for pool, (moments, blocks) in zip(usage.pools, histories, strict=True):
        state = dict(zip(moments, blocks, strict=True))
        seen = []
        held = 0
        for second in range(moments[0], end):
            held = state.get(second, held)
            seen.append(held)
        assert_is_that_of_looks(pool, seen)
        looks += seen
    assert usage.combined is not None
    assert_is_that_of_looks(usage.combined, looks)


def assert_is_that_of_looks(usage: PoolUsage, looks: list[int]) -> None:
    assert usage.observed_sec == len(looks)
    if not looks:
        assert usage.mean_pct is None
        return
    assert usage.mean_pct == pytest.approx(sum(looks) / len(looks))
    assert usage.p50_pct == sorted(looks)[math.ceil(len(looks) * 50 / 100) - 1]
    assert usage.p95_pct == sorted(looks)[math.ceil(len(looks) * 95 / 100) - 1]
    assert usage.held_share == pytest.approx(sum(held > 0 for held in looks) / len(looks))
    assert usage.bands is not None
    assert usage.bands.over_90 == pytest.approx(sum(held > 90 for held in looks) / len(looks))
    assert usage.bands.under_40 == pytest.approx(sum(held < 40 for held in looks) / len(looks))


@pytest.mark.usefixtures("small_chunks")
def test_a_table_is_the_same_in_chunks(session: SessionBuilder) -> None:
    # 1,000 rows of either engine, 1 ms apart, that go 0, 1, … 99 and again, or stay at 7.
    count = 1000
    for begin in range(0, count, 50):
        numbers = range(begin, begin + 50)
        session.usage(*((number / 1000, number % 100) for number in numbers))
        session.usage(*((number / 1000, 7) for number in numbers), engine=1)
    session.metadata(ended_at="2026-01-31T12:00:01Z")
    first, second = usage_of(session).pools
    assert (first.observed_sec, second.observed_sec) == (1, 1)
    assert first.mean_pct == pytest.approx(49.5)
    assert second.mean_pct == 7
    assert (first.p50_pct, first.p95_pct) == (49, 94)
    assert (first.peak.timestamp_sec, second.peak.timestamp_sec) == (0.099, 0)
    assert (first.end.held_blocks, second.end.held_blocks) == (99, 7)
