# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pandas
import pytest

from analysis import Summary, open_session, summarize
from analysis.evictions import Evicted
from tests.analysis.builder import SessionBuilder


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
    assert evictions.total == Evicted(blocks=5, never_reused=3, copies_left=2)
    assert evictions.by_reason == {
        "reallocated": Evicted(3, 2, 2),
        "reset": Evicted(1, 1, 0),
        "explicit": Evicted(1, 0, 0),
    }
    assert evictions.by_origin == {
        "prompt": Evicted(2, 1, 1),
        "output": Evicted(2, 2, 1),
        "unknown": Evicted(1, 0, 0),
    }
    assert evictions.by_engine == {0: Evicted(3, 2, 2), 1: Evicted(2, 1, 0)}


def test_without_an_eviction_there_is_no_lifetime(session: SessionBuilder) -> None:
    summary = summary_of(session)
    assert summary.evictions.total == Evicted(0, 0, 0)
    assert summary.lifetimes.lifetime.count == 0
    assert summary.lifetimes.lifetime.mean_sec is None


@pytest.mark.usefixtures("small_pieces")
def test_evictions_are_the_same_in_pieces(session: SessionBuilder) -> None:
    count = 3001
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
    assert summary.evictions.total.never_reused == 1001
    assert summary.evictions.by_origin["output"].blocks == 1500
    # The lifetimes are 0, 1, … 3,000 in another order.
    lifetime = summary.lifetimes.lifetime
    assert (lifetime.mean_sec, lifetime.p50_sec, lifetime.max_sec) == (1500, 1500, 3000)
    assert lifetime.p95_sec == pytest.approx(2850)


@pytest.mark.usefixtures("small_pieces")
def test_requests_are_the_same_in_pieces(session: SessionBuilder) -> None:
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
