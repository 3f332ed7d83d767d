# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pandas
import pytest

from analysis import Summary, open_session, summarize
from analysis.judgement.story import sentences
from analysis.pool.evictions import Evicted, Interval, Reused
from tests.analysis.builder import SessionBuilder
from tests.analysis.stories import swept


def summary_of(session: SessionBuilder) -> Summary:
    return summarize(open_session(session.folder))


def test_lifetimes_and_idle_times_have_the_quantiles_of_pandas(session: SessionBuilder) -> None:
    lifetimes = [1.0, 2.0, 3.0, 4.0, 10.0]
    session.evictions(*({"lifetime_sec": sec, "idle_sec": sec / 2} for sec in lifetimes))
    spread = summary_of(session).lifetimes.lifetime
    assert (spread.count, spread.mean_sec, spread.max_sec) == (5, 4, 10)
    # At position 0.95 * 4 = 3.8, 0.8 of the way from 4 to 10; at 3.96, 0.96 of it.
    assert spread.p50_sec == 3
    assert spread.p95_sec == pytest.approx(8.8)
    assert spread.p99_sec == pytest.approx(9.76)
    idle = summary_of(session).lifetimes.idle
    assert idle.p95_sec == pytest.approx(4.4)
    table = pandas.read_csv(session.folder / "kv_cache_evictions.csv")
    assert spread.mean_sec == table["lifetime_sec"].mean()
    assert spread.p99_sec == pytest.approx(table["lifetime_sec"].quantile(0.99))


def test_bins_are_1_2_5_and_include_their_lower_bounds(session: SessionBuilder) -> None:
    lifetimes = [0.0005, 0.001, 0.0019, 0.002, 1, 1.999999, 2, 600_000]
    session.evictions(*({"lifetime_sec": sec, "idle_sec": sec} for sec in lifetimes))
    bins = summary_of(session).lifetimes.lifetime.bins
    assert {(bin.from_sec, bin.to_sec): bin.count for bin in bins if bin.count} == {
        (0.0, 0.001): 1,
        (0.001, 0.002): 2,
        (0.002, 0.005): 1,
        (1.0, 2.0): 2,
        (2.0, 5.0): 1,
        (500_000.0, None): 1,
    }
    # One after the other, with none left out in between: 9 decades of 3, and both ends.
    assert [bin.to_sec for bin in bins[:-1]] == [bin.from_sec for bin in bins[1:]]
    assert len(bins) == 9 * 3 + 1
    assert summary_of(session).lifetimes.idle.bins == bins


def test_evictions_are_counted_by_reason_and_by_what_the_content_was(
    session: SessionBuilder,
) -> None:
    session.evictions(
        {"reason": "reallocated", "origin": "prompt", "reuse_count": 0, "copies_left": 0},
        {"reason": "reallocated", "origin": "prompt", "reuse_count": 3, "copies_left": 2},
        {"reason": "reallocated", "origin": "output", "reuse_count": 0, "copies_left": 1},
        {"reason": "reset", "origin": "output", "reuse_count": 0, "engine": 1},
        {"reason": "explicit", "origin": "", "reuse_count": 1, "engine": 1},
    )
    evictions = summary_of(session).evictions
    # Blocks, never reused, copies left, and the tokens of the first two: 16 a block.
    assert evictions.total == Evicted(5, 3, 2, 80, 48)
    assert evictions.by_reason == {
        "reallocated": Evicted(3, 2, 2, 48, 32),
        "reset": Evicted(1, 1, 0, 16, 16),
        "explicit": Evicted(1, 0, 0, 16, 0),
    }
    assert evictions.by_origin == {
        "prompt": Evicted(2, 1, 1, 32, 16),
        "output": Evicted(2, 2, 1, 32, 32),
        "unknown": Evicted(1, 0, 0, 16, 0),
    }
    assert evictions.by_engine == {0: Evicted(3, 2, 2, 48, 32), 1: Evicted(2, 1, 0, 32, 16)}


def test_every_group_counts_with_its_own_block_size(session: SessionBuilder) -> None:
    groups = [
        {"kind": "FullAttentionSpec", "block_size": 16},
        {"kind": "MambaSpec", "block_size": 64},
    ]
    session.metadata(groups=groups)
    session.evictions({"group": 0}, {"group": 1}, {"group": 1, "reuse_count": 1})
    evictions = summary_of(session).evictions
    assert evictions.by_group == {0: Evicted(1, 1, 0, 16, 16), 1: Evicted(2, 1, 0, 128, 64)}
    assert evictions.total == Evicted(3, 2, 0, 144, 80)
    # A group that the session does not describe leaves the tokens open.
    session.evictions({"group": 2})
    assert summary_of(session).evictions.total == Evicted(4, 3, 0, None, None)


def test_reuse_counts_come_in_powers_of_two(session: SessionBuilder) -> None:
    counts = [0, 0, 1, 2, 3, 4, 7, 8, 64, 1000]
    session.evictions(*({"reuse_count": count} for count in counts))
    assert summary_of(session).evictions.reuse_counts == (
        Reused(0, 0, 2),
        Reused(1, 1, 1),
        Reused(2, 3, 2),
        Reused(4, 7, 2),
        Reused(8, 15, 1),
        Reused(16, 31, 0),
        Reused(32, 63, 0),
        Reused(64, None, 2),
    )


def test_start_up_is_no_part_of_the_rate_or_of_the_story(session: SessionBuilder) -> None:
    """The engine took 6 of the session's 10 seconds to start."""
    session.usage((6, 50), (8, 100))
    session.evictions(*({"timestamp_sec": sec} for sec in (7, 8)))
    found = summary_of(session)
    assert found.evictions.rate.mean_per_sec == 0.5
    story = next(sentences(found))
    assert story.startswith("In the 4.00 s since the first request (of 10.00 s), the KV cache had ")
    assert "75.00 % of its blocks in use on average" in story


def test_the_story_of_a_whole_session_has_one_time(session: SessionBuilder) -> None:
    session.usage((0, 50), (8, 100))
    assert next(sentences(summary_of(session))).startswith("Over 10.00 s, the KV cache had 60.00 %")


def test_the_rate_over_time_has_its_peak_second(session: SessionBuilder) -> None:
    times = [1.0, 1.2, 1.999999, 2.0, 7.5]
    session.evictions(*({"timestamp_sec": sec} for sec in times))
    rate = summary_of(session).evictions.rate
    assert rate.mean_per_sec == 0.5
    assert (rate.peak_per_sec, rate.peak_sec, rate.width_sec) == (3, 1, 1)
    assert rate.intervals == (Interval(1, 3, 0), Interval(2, 1, 0), Interval(7, 1, 0))
    # Seconds 1 to 1,000 are 1,000: bins of 10 s would be 101.
    session.evictions({"timestamp_sec": 1_000.5})
    rate = summary_of(session).evictions.rate
    assert rate.width_sec == 10
    assert rate.intervals == (Interval(0, 5, 0), Interval(1_000, 1, 0))


def test_what_was_asked_for_again_is_regretted(session: SessionBuilder) -> None:
    """Contents 2 and 3, evicted in second 3.001 and asked for in second 5."""
    swept(session)
    evictions = summary_of(session).evictions
    regretted = evictions.regretted
    assert (regretted.blocks, regretted.share, regretted.requests) == (2, 0.4, 1)
    assert regretted.recomputed_tokens == 32
    assert regretted.after.count == 2
    assert regretted.after.p50_sec == pytest.approx(1.999)
    # 77 and 11; of 4 there was a copy.
    assert (evictions.total.copies_left, evictions.harmless) == (1, 2)
    assert [interval.regretted for interval in evictions.rate.intervals] == [2, 0, 0]
    assert evictions.by_origin["output"] == Evicted(1, 1, 0, 16, 16)


def test_an_eviction_during_warm_up_is_not_counted_and_its_miss_is(
    session: SessionBuilder,
) -> None:
    swept(session)
    summary = summarize(open_session(session.folder, after_sec=4.5))
    assert summary.evictions.total.blocks == 2
    assert summary.evictions.regretted.blocks == 0
    assert summary.blame.recomputed_tokens == 32


def test_without_an_eviction_there_is_no_lifetime(session: SessionBuilder) -> None:
    summary = summary_of(session)
    assert summary.evictions.total == Evicted(0, 0, 0, 0, 0)
    assert summary.evictions.rate.peak_sec is None
    assert summary.evictions.regretted.share is None
    assert summary.lifetimes.lifetime.count == 0
    assert summary.lifetimes.lifetime.mean_sec is None


@pytest.mark.usefixtures("small_chunks")
def test_evictions_are_the_same_in_chunks(session: SessionBuilder) -> None:
    count = 601
    session.evictions(
        *(
            {
                "lifetime_sec": (number * 7919) % count,
                "reuse_count": number % 3,
                "origin": ("prompt", "output")[number % 2],
            }
            for number in range(count)
        )
    )
    summary = summary_of(session)
    assert summary.evictions.total.blocks == count
    assert summary.evictions.total.never_reused == 201
    assert summary.evictions.by_origin["output"].blocks == 300
    # The lifetimes are 0, 1, … 600 in another order.
    lifetime = summary.lifetimes.lifetime
    assert (lifetime.mean_sec, lifetime.p50_sec, lifetime.max_sec) == (300, 300, 600)
    assert lifetime.p95_sec == pytest.approx(570)


@pytest.mark.usefixtures("small_chunks")
def test_requests_are_the_same_in_chunks(session: SessionBuilder) -> None:
    session.requests(*({"input_length": number, "preemptions": 0} for number in range(1001)))
    session.append("requests.jsonl", '{"input_length": 7, "preemptions": 2}')
    requests = summary_of(session).requests
    assert (requests.ended, requests.input_tokens) == (1002, 500_500 + 7)
    assert (requests.preempted, requests.most_preemptions) == (1, 2)


def test_allocations_are_counted_in_blocks_and_in_calls(session: SessionBuilder) -> None:
    session.rows(
        "kv_cache_allocations.csv",
        {"event": "allocate", "num_blocks": 20, "evicted_blocks": 3},
        {"event": "allocate", "num_blocks": 5, "evicted_blocks": 1, "engine": 1},
        {"event": "reuse", "num_blocks": 63},
        {"event": "free", "num_blocks": 24, "request_id": '"a,b'},
        {"event": "cache", "num_blocks": 8},
        {"event": "reset", "num_blocks": 7, "evicted_blocks": 7, "group": ""},
        {"event": "reset_refused", "num_blocks": 0, "group": ""},
        {"event": "reset_refused", "num_blocks": 0, "group": ""},
    )
    moves = summary_of(session).allocations
    assert (moves.allocated.blocks, moves.allocated.calls) == (25, 2)
    assert moves.allocated.evicted_blocks == 4
    assert (moves.reused.blocks, moves.reused.calls) == (63, 1)
    assert (moves.freed.blocks, moves.freed.calls) == (24, 1)
    assert (moves.cached.blocks, moves.cached.calls) == (8, 1)
    assert (moves.resets, moves.resets_refused) == (1, 2)
