# SPDX-License-Identifier: Apache-2.0
"""What the charts show, counted by hand, or once more in the plainest way."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl
import pytest

from analysis import open_session, series, summarize
from analysis.series import (
    block_map,
    depths,
    evictions,
    hit_rate,
    phases,
    pools,
    slots,
    steps,
    timeline,
)
from analysis.series.bins import Bins, of_session
from analysis.series.slots import SlotSeries, SlotTally
from analysis.tables.session import Session
from tests.analysis.builder import SessionBuilder
from tests.analysis.timed import timed, with_gpu_time


@pytest.fixture(params=[100, 10_000])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read in chunks of so many bytes: of a row or three, or of a few hundred."""
    monkeypatch.setattr("analysis.tables.reading._CHUNK", request.param)


def opened(builder: SessionBuilder, after_sec: float = 0.0) -> tuple[Session, Bins]:
    """A session of 10 s, in bins of a second."""
    session = open_session(builder.folder, after_sec=after_sec)
    return session, of_session(session, round(10 - after_sec))


def frames(builder: SessionBuilder, table: str, columns: tuple[str, ...]) -> list[pl.DataFrame]:
    return list(open_session(builder.folder).batches(table, columns))


def test_bins_cover_the_session(session: SessionBuilder) -> None:
    _, bins = opened(session, after_sec=4)
    assert bins == Bins(4, 1, 6)
    assert bins.edges == (4, 5, 6, 7, 8, 9, 10)
    assert bins.middles[0] == 4.5
    times = pl.DataFrame({"at": [3.0, 4.0, 4.999, 5.0, 10.0, 11.0]})
    assert times.select(bins.of(pl.col("at"))).to_series().to_list() == [0, 0, 0, 1, 5, 5]


@pytest.mark.parametrize(("ended", "count"), [("00:01", 60), ("00:20", 200), ("59:00", 360)])
def test_a_long_session_has_no_more_bins(session: SessionBuilder, ended: str, count: int) -> None:
    session.metadata(ended_at=f"2026-01-31T12:{ended}.000000Z")
    whole = of_session(open_session(session.folder))
    assert whole.count == count
    minutes, seconds = map(int, ended.split(":"))
    assert whole.end_sec == pytest.approx(60 * minutes + seconds)


@pytest.mark.usefixtures("small_chunks")
def test_a_level_holds_until_the_next_row(session: SessionBuilder) -> None:
    session.usage((0.5, 10), (2.25, 90), (2.5, 20), running_reqs=3, waiting_reqs=1)
    session.usage((7, 100), running_reqs=5, waiting_reqs=0)
    found = pools.measure(*opened(session))
    # 2 to 3 s: 10 for a quarter, 90 for a quarter, 20 for a half.
    assert found.pools == 1
    assert found.held == pytest.approx((10, 10, 35, 20, 20, 20, 20, 100, 100, 100))
    assert found.cached == pytest.approx((10, 10, 15, 20, 20, 20, 20, 0, 0, 0))
    assert found.free == pytest.approx((80, 80, 50, 60, 60, 60, 60, 0, 0, 0))
    assert found.usage.mean == pytest.approx(found.held)
    assert found.usage.low == (10, 10, 10, 20, 20, 20, 20, 100, 100, 100)
    assert found.usage.high == (10, 10, 90, 20, 20, 20, 20, 100, 100, 100)
    assert found.running.mean == pytest.approx((3,) * 7 + (5,) * 3)
    assert found.waiting.high == (1,) * 7 + (0,) * 3


def test_before_its_first_row_nothing_is_known(session: SessionBuilder) -> None:
    session.usage((2, 10))
    found = pools.measure(*opened(session))
    assert found.held[:3] == (None, None, 10)
    assert found.usage.high[:3] == (None, None, 10)


def test_what_held_when_warm_up_ended_holds_on(session: SessionBuilder) -> None:
    session.usage((0, 90), (1, 50), (5.5, 20))
    found = pools.measure(*opened(session, after_sec=4))
    assert found.held == pytest.approx((50, 35, 20, 20, 20, 20))
    assert found.usage.high == (50, 50, 20, 20, 20, 20)


@pytest.mark.usefixtures("small_chunks")
def test_pools_add_up_and_their_extremes_are_any_pools(session: SessionBuilder) -> None:
    session.usage((0, 20), running_reqs=2, engine=0)
    session.usage((0, 60), running_reqs=4, engine=1)
    session.usage((5, 0), running_reqs=0, engine=0)
    found = pools.measure(*opened(session))
    assert found.pools == 2
    assert found.held == pytest.approx((80,) * 5 + (60,) * 5)
    assert found.usage.mean == pytest.approx((40,) * 5 + (30,) * 5)
    assert (found.usage.low[0], found.usage.high[0]) == (20, 60)
    assert (found.usage.low[9], found.usage.high[9]) == (0, 60)
    assert found.running.mean == pytest.approx((3,) * 5 + (2,) * 5)


def test_no_row_is_no_level(session: SessionBuilder) -> None:
    found = pools.measure(*opened(session))
    assert (found.pools, found.held, found.usage.mean) == (0, (None,) * 10, (None,) * 10)


@pytest.mark.usefixtures("small_chunks")
def test_eviction_rate(session: SessionBuilder) -> None:
    session.evictions(
        *({"timestamp_sec": time} for time in (0.25, 0.5, 0.5, 3.25, 9.5)),
        {"timestamp_sec": 0.75, "reason": "reset"},
    )
    tally = evictions.EvictionRateTally(Bins(0, 5, 2))
    for frame in frames(session, "kv_cache_evictions", evictions.COLUMNS):
        tally.add(frame)
    rate = tally.result()
    # Four in the first five seconds for room and one by a reset; four of them in the first one.
    assert rate.mean == {"reallocated": (0.8, 0.2), "reset": (0.2, 0.0)}
    assert rate.busiest == (4, 1)
    assert rate.parts == 5
    assert list(rate.mean) == ["reallocated", "reset"]


def test_short_bins_have_one_part(session: SessionBuilder) -> None:
    assert evictions.EvictionRateTally(Bins(0, 0.1, 100)).parts == 1
    assert evictions.EvictionRateTally(Bins(0, 100, 100)).parts == 10


def test_block_map_of_one_eviction(session: SessionBuilder) -> None:
    session.evictions(
        # In use from 0.5 to 2 s, then kept for reuse until 3.5 s.
        {"timestamp_sec": 3.5, "lifetime_sec": 3, "evictable_sec": 1.5, "block_id": 2}
    )
    found = drawn(session, Bins(0, 1, 4), 4)
    nothing = (0, 0, 0, 0)
    assert found.used == (nothing, nothing, (50, 100, 0, 0), nothing)
    assert found.kept == (nothing, nothing, (0, 0, 100, 50), nothing)
    assert (found.blocks_per_row, found.known_share) == (1, pytest.approx(3 / 16))


def test_a_block_that_was_held_when_it_was_evicted_was_in_use(session: SessionBuilder) -> None:
    session.evictions({"timestamp_sec": 2, "lifetime_sec": 2, "block_id": 0})
    found = drawn(session, Bins(0, 1, 4), 1)
    assert (found.used, found.kept) == (((100, 100, 0, 0),), ((0, 0, 0, 0),))


def test_other_pools_and_unknown_blocks_are_not_drawn(session: SessionBuilder) -> None:
    session.evictions(
        {"timestamp_sec": 4, "lifetime_sec": 4, "block_id": 1, "engine": 1},
        {"timestamp_sec": 4, "lifetime_sec": 4, "block_id": 1, "pool": 1},
        {"timestamp_sec": 4, "lifetime_sec": 4, "block_id": 2},
    )
    assert tallied(session, Bins(0, 1, 4), 2).result() is None


def test_the_engine_with_the_most_evictions_is_drawn(session: SessionBuilder) -> None:
    session.usage((0, 50), engine=0)
    session.usage((0, 50), engine=1)
    session.evictions({"block_id": 1}, {"block_id": 1, "engine": 1}, {"block_id": 2, "engine": 1})
    opened_session = open_session(session.folder)
    found = series.measure(opened_session, summarize(opened_session)).block_map
    assert found is not None
    assert (found.engine, found.pool, found.blocks_per_row) == (1, 0, 1)


def tallied(session: SessionBuilder, bins: Bins, blocks: int) -> block_map.BlockMapTally:
    found = block_map.BlockMapTally(bins, 0, 0, blocks)
    for frame in frames(session, "kv_cache_evictions", block_map.COLUMNS):
        found.add(frame)
    return found


def drawn(session: SessionBuilder, bins: Bins, blocks: int) -> block_map.BlockMap:
    found = tallied(session, bins, blocks).result()
    assert found is not None
    return found


@pytest.mark.usefixtures("small_chunks")
def test_block_map_is_the_sum_of_all_overlaps(session: SessionBuilder) -> None:
    draw = random.Random(1)
    blocks, bins = 500, Bins(2, 0.5, 12)
    free_from = [0.0] * blocks
    rows = []
    for _ in range(2_000):
        block = draw.randrange(1, blocks)
        allocated = free_from[block] + draw.random()
        released = allocated + draw.random()
        evicted = free_from[block] = released + draw.random()
        rows.append((block, allocated, released, evicted))
    session.evictions(
        *(
            {
                "timestamp_sec": evicted,
                "lifetime_sec": evicted - allocated,
                "evictable_sec": evicted - released,
                "block_id": block,
            }
            for block, allocated, released, evicted in sorted(rows, key=lambda part: part[3])
            if evicted <= bins.end_sec
        )
    )
    found = drawn(session, bins, blocks)
    assert (found.blocks_per_row, len(found.used)) == (4, 125)
    for row, (used, kept) in enumerate(zip(found.used, found.kept, strict=True)):
        mine = [part for part in rows if part[0] // 4 == row and part[3] <= bins.end_sec]
        for index, begin in enumerate(bins.edges[:-1]):
            end = begin + bins.width_sec
            capacity = 4 * bins.width_sec
            expected_used = sum(overlap(begin, end, a, b) for _, a, b, _ in mine) / capacity
            expected_kept = sum(overlap(begin, end, b, c) for _, _, b, c in mine) / capacity
            assert used[index] == pytest.approx(100 * expected_used, abs=0.51)
            assert kept[index] == pytest.approx(100 * expected_kept, abs=0.51)


def overlap(begin: float, end: float, since: float, until: float) -> float:
    return max(0.0, min(end, until) - max(begin, since))


def test_hit_rate(session: SessionBuilder) -> None:
    session.lookups(
        {"timestamp_sec": 0.5, "request_id": "a", "query_tokens": 100, "hit_tokens": 0},
        {"timestamp_sec": 0.6, "request_id": "b", "query_tokens": 100, "hit_tokens": 50},
        # Looked up again after a preemption, and not admitted: neither counts.
        {
            "timestamp_sec": 1.5,
            "request_id": "b",
            "query_tokens": 100,
            "hit_tokens": 100,
            "kind": "resumed",
        },
        {
            "timestamp_sec": 1.5,
            "request_id": "c",
            "query_tokens": 99,
            "hit_tokens": 99,
            "admitted": 0,
        },
        {"timestamp_sec": 2.5, "request_id": "d", "query_tokens": 200, "hit_tokens": 150},
    )
    found = hit_rate.measure(*opened(session))
    assert found.in_bin[:4] == (0.25, None, 0.75, None)
    assert found.so_far[:4] == (0.25, 0.25, 0.5, 0.5)
    assert found.so_far[-1] == 0.5
    assert found.query_tokens[:4] == (200, 0, 200, 0)


def request(name: str, **values: object) -> dict[str, object]:
    return {
        "timestamp": 1000,
        "request_id": name,
        "input_length": 32,
        "output_length": 5,
        "block_size": 16,
        "hit_tokens": 0,
        "preemptions": 0,
        "queue_sec": 0.5,
        "first_token_sec": 2,
        "finish_sec": 3,
        "finish_reason": "stop",
        **values,
    }


def depths_of(session: SessionBuilder) -> depths.Depths:
    tally = depths.DepthTally()
    for frame in frames(session, "requests", depths.COLUMNS):
        tally.add(frame)
    return tally.result()


@pytest.mark.usefixtures("small_chunks")
def test_sharing_by_depth(session: SessionBuilder) -> None:
    session.requests(
        # Two full blocks; the third id stands for a partial one.
        request("a", hash_ids=[1, 2, 901], input_length=40),
        request("b", hash_ids=[1, 2, 902], input_length=40, hit_tokens=32),
        request("c", hash_ids=[1, 3], hit_tokens=16),
        request("d", hash_ids=[7]),
        # Too short for a block, and the same content on another engine.
        request("e", hash_ids=[903], input_length=9),
        request("f", hash_ids=[7], input_length=16, engine=1),
    )
    found = depths_of(session)
    assert found.block_size == 16
    assert found.depths == (
        depths.Depth(1, 16, prompts=5, distinct=3, shareable=2, found=2, hottest=3),
        depths.Depth(2, 32, prompts=3, distinct=2, shareable=1, found=1, hottest=2),
    )


def test_sharing_needs_content_ids_and_one_block_size(session: SessionBuilder) -> None:
    assert depths_of(session) == depths.Depths((), None)
    session.requests(request("a"))
    assert depths_of(session) == depths.Depths((), None)
    session.requests(request("b", hash_ids=[1, 2]), request("c", hash_ids=[1], block_size=32))
    assert depths_of(session) == depths.Depths((), None)


def picked(session: SessionBuilder, one_in: int) -> timeline.Timeline:
    tally = timeline.TimelineTally(one_in)
    for frame in frames(session, "requests", timeline.COLUMNS):
        tally.add(frame)
    return tally.result()


@pytest.mark.usefixtures("small_chunks")
def test_every_third_request_is_picked(session: SessionBuilder) -> None:
    session.requests(*(request(str(number), timestamp=number) for number in range(10)))
    found = picked(session, 3)
    assert [span.request_id for span in found.spans] == ["0", "3", "6", "9"]
    assert (found.one_in, found.ended) == (3, 10)


def test_a_span(session: SessionBuilder) -> None:
    session.requests(
        request("late", timestamp=2000, hit_tokens=16, preemptions=2),
        request("never", timestamp=1500, queue_sec=None, first_token_sec=None),
    )
    never, late = picked(session, 1).spans
    assert (never.arrived_sec, never.admitted_sec, never.first_token_sec) == (1.5, None, None)
    assert (late.arrived_sec, late.admitted_sec, late.first_token_sec) == (2, 2.5, 2)
    assert (late.ended_sec, late.input_tokens, late.output_tokens) == (3, 32, 5)
    assert (late.hit_tokens, late.preemptions, late.finish_reason) == (16, 2, "stop")


@pytest.mark.parametrize(("ended", "one_in"), [(0, 1), (300, 1), (301, 2), (100_000, 334)])
def test_at_most_300_are_picked(ended: int, one_in: int) -> None:
    assert timeline.TimelineTally.of(ended).one_in == one_in
    assert -(-ended // one_in) <= 300


def test_steps_that_scheduled_nothing_are_left_out(session: SessionBuilder, tmp_path: Path) -> None:
    def step(time: float, requests: int, prefill: int, decode: int, preempted: int = 0) -> dict:
        return {
            "timestamp_sec": time,
            "scheduled_reqs": requests,
            "scheduled_tokens": prefill + decode,
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "preempted_reqs": preempted,
        }

    session.rows(
        "scheduler_steps.csv",
        step(0.1, 2, 100, 1),
        step(0.2, 4, 0, 4, preempted=2),
        step(0.3, 0, 0, 0, preempted=1) | {"repeats": 50},
        step(2.5, 1, 0, 1),
    )
    found = steps.measure(*opened(session))
    assert found.requests_mean[:3] == (3, None, 1)
    assert found.requests_high[:3] == (4, None, 1)
    assert found.prefill_mean[:3] == (50, None, 0)
    assert found.decode_mean[:3] == (2.5, None, 1)
    assert found.tokens_high[:3] == (101, None, 1)
    assert found.preempted[:3] == (3, 0, 0)


def slots_of(builder: SessionBuilder, after_sec: float = 0.0) -> SlotSeries:
    session, bins = opened(builder, after_sec)
    tally = SlotTally(bins, 16)
    for batch in session.batches("requests", slots.COLUMNS, history=True):
        tally.add(batch)
    found = tally.result(pools.measure(session, bins))
    assert found is not None
    return found


def one_that_grows(session: SessionBuilder, **other: object) -> None:
    """A prompt of 20 tokens from 1.5 to 3 s; then it grows to 36 tokens until 7 s: 12 lengths in
    two blocks and 4 in three. It holds 2 blocks of the pool's 100 until 6 s, and then 3."""
    session.requests(
        {
            "timestamp": 1_000,
            "queue_sec": 0.5,
            "first_token_sec": 3,
            "finish_sec": 7,
            "input_length": 20,
            "output_length": 17,
            "computed_tokens": 36,
            "num_blocks": 3,
            "preemptions": 0,
            "block_size": 16,
            **other,
        }
    )
    session.usage((0, 0), (1.5, 2), (6, 3), (7, 0))


def test_slots_that_hold_a_token(session: SessionBuilder) -> None:
    one_that_grows(session)
    found = slots_of(session)
    # In two blocks it lacks 11, 10, ... 0 tokens, and in three 15, 14, 13, 12.
    mean = (sum(range(12)) + 15 + 14 + 13 + 12) / 16
    assert found.empty == pytest.approx((0, 6, 12, mean, mean, mean, mean, 0, 0, 0))
    held = (0, 16, 32, 32, 32, 32, 48, 0, 0, 0)
    assert found.token == pytest.approx(
        [all_slots - empty for all_slots, empty in zip(held, found.empty, strict=True)]
    )
    assert found.free[0] == 1600
    assert found.cached[3] == 32
    # All four are all slots of the pool, at any time.
    parts = zip(found.token, found.empty, found.cached, found.free, strict=True)
    assert [sum(part) for part in parts] == pytest.approx([1600] * 10)


def test_slots_of_the_warm_up_are_left_out(session: SessionBuilder) -> None:
    one_that_grows(session)
    whole, later = slots_of(session), slots_of(session, after_sec=4)
    assert later.empty == pytest.approx(whole.empty[4:])
    assert later.token == pytest.approx(whole.token[4:])


def test_slots_of_a_preempted_request_count_as_full(session: SessionBuilder) -> None:
    one_that_grows(session, preemptions=1)
    assert set(slots_of(session).empty) == {0}


def test_there_are_no_more_empty_slots_than_slots(session: SessionBuilder) -> None:
    """The engine says that nothing was held."""
    one_that_grows(session)
    (session.folder / "kv_cache_usage.csv").unlink()
    session.usage((0, 0), (9, 1))
    found = slots_of(session)
    assert found.empty[:9] == found.token[:9] == (0,) * 9


def test_without_a_request_slots_are_not_known(session: SessionBuilder) -> None:
    session.usage((0, 2), (5, 0))
    whole = open_session(session.folder)
    assert series.measure(whole, summarize(whole)).slots is None


def test_empty_slots_are_those_of_the_summary(session: SessionBuilder) -> None:
    one_that_grows(session)
    opened_session = open_session(session.folder)
    summary = summarize(opened_session)
    found = series.measure(opened_session, summary).slots
    assert found is not None
    assert summary.fragmentation is not None
    # The summary has it of the request's own blocks: of an even pace, two and then three of them.
    seconds = (7 - 3, 3 - 1.5)
    own = seconds[0] * (12 * 32 + 4 * 48) / 16 + seconds[1] * 32
    width = 10 / len(found.empty)
    empty = width * sum(value or 0 for value in found.empty)
    assert empty / own == pytest.approx(summary.fragmentation.actual.over_time)
    # The request came in the warm-up, and grows after it.
    later = open_session(session.folder, after_sec=4)
    assert (series.measure(later, summarize(later)).slots or found).empty[0] == pytest.approx(7.5)


@pytest.mark.usefixtures("small_chunks")
def test_steps_by_phase(session: SessionBuilder) -> None:
    with_gpu_time(session)
    timed(session, (5.5, 0, 4, 60_000), worker=1)
    found = phases.measure(*opened(session))
    none = [None] * 10
    assert found.tokens == {
        "prefill": (None, 1000, 500, *none[3:]),
        "mixed": (*none[:3], 404, *none[4:]),
        "decode": (*none[:4], 4, 4, 2, *none[7:]),
    }
    assert found.gpu_ms == {
        "prefill": (None, 400, 200, *none[3:]),
        "mixed": (*none[:3], 300, *none[4:]),
        "decode": (*none[:4], 20, 50, *none[6:]),
    }
    assert found.encoder_ms == (None, 100, *none[2:])


def test_steps_without_gpu_time(session: SessionBuilder) -> None:
    session.rows(
        "scheduler_steps.csv",
        {"scheduled_tokens": 4, "prefill_tokens": 4, "decode_tokens": 0, "scheduled_reqs": 1},
    )
    found = phases.measure(*opened(session))
    assert list(found.tokens) == ["prefill"]
    assert (found.gpu_ms, found.encoder_ms) == ({}, ())
