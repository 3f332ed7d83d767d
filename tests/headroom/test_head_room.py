# SPDX-License-Identifier: Apache-2.0
"""Head room of sessions that are written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from analysis import open_session, summarize
from analysis.headroom.head_room import HeadRoom, Room
from analysis.renderers.text import summary as text
from tests.analysis.builder import METADATA, SessionBuilder

BLOCK = 16
LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}


def found(session: SessionBuilder) -> HeadRoom:
    return summarize(open_session(session.folder)).head_room


def room(session: SessionBuilder) -> Room:
    known = found(session).room
    assert known is not None
    return known


def pool(session: SessionBuilder, blocks: int, **scheduler: Any) -> None:
    """A pool of so many usable blocks."""
    cache = {**METADATA["cache"], "blocks": blocks + 1}
    session.metadata(cache=cache, scheduler={**LIMITS, **scheduler})


def requests(
    session: SessionBuilder,
    *times: tuple[float, float],
    prompt: int = 40,
    computed: int = 40,
    contents: list[int] | None = None,
    **other: Any,
) -> None:
    """Requests that came and ended at these times, each with ``computed`` tokens at its end."""
    for number, (came, ended) in enumerate(times):
        name = f"{came}-{number}"
        asked = {"timestamp_sec": came, "request_id": name, "query_tokens": prompt}
        session.lookups({**asked, "hit_tokens": 0})
        own = [1_000 * (number + 1) + place for place in range(computed // BLOCK)]
        chain = [*(contents or []), *own[len(contents or []) :]]
        session.requests(
            {
                "timestamp": 1e3 * came,
                "request_id": name,
                "input_length": prompt,
                "output_length": computed - prompt + 1,
                "computed_tokens": computed,
                "block_size": BLOCK,
                "hash_ids": chain[: prompt // BLOCK],
                "output_hash_ids": chain[prompt // BLOCK :],
                "hit_tokens": 0,
                "queue_sec": 0,
                "first_token_sec": came,
                "finish_sec": ended,
                "finish_reason": "length",
                **other,
            }
        )


def test_requests_of_one_length_fit_as_often_as_arithmetic_says(session: SessionBuilder) -> None:
    """A step in 1 block, 16 in 2 and 16 in 3: all of 33 steps are as likely."""
    pool(session, 12)
    requests(session, *[(1, 2)] * 5, prompt=16, computed=48)
    one = np.array([0, 1, 16, 16]) / 33
    known = room(session)
    assert known.requests == 5
    assert known.growth_blocks == 2
    assert known.p99_blocks == 3
    assert known.mean_blocks == pytest.approx(81 / 33, abs=0.05)
    together = one
    for crowd in known.curve:
        while len(together) < 3 * crowd.requests + 1:
            together = np.convolve(together, one)
        # Four standard errors.
        error = 4 * 0.5 / np.sqrt(known.draws)
        assert crowd.over_share == pytest.approx(together[13:].sum(), abs=error)
        assert crowd.mean_blocks == pytest.approx(crowd.requests * 81 / 33, rel=0.02)
    # Four hold at most 12 blocks. Five hold more with a chance of a half: 0.498 by the sum above.
    assert known.fit == 4
    assert known.curve[-1].over_share > 0.99


def test_requests_that_share_a_beginning_hold_it_once(session: SessionBuilder) -> None:
    """Ten blocks, of which nine are the same: two requests hold 11, four hold 13."""
    pool(session, 12)
    requests(session, *[(1, 2)] * 6, prompt=160, computed=160, contents=list(range(1, 10)))
    known = room(session)
    assert known.mean_blocks == 10
    assert [crowd.mean_blocks for crowd in known.curve[:4]] == [10, 11, 12, 13]
    assert (known.fit, known.half) == (3, 3)
    assert known.shared_share == pytest.approx(1 - 12 / 30)
    # Its answer does not grow, so nobody is preempted.
    assert all(crowd.preemptions == 0 for crowd in known.curve)


def test_answers_are_not_shared(session: SessionBuilder) -> None:
    """Of four blocks two are the prompt's. Of 32 steps half have three blocks and half four."""
    pool(session, 12)
    requests(session, (1, 2), (3, 4), prompt=33, computed=64, contents=[1, 2, 3, 4])
    known = room(session)
    assert [crowd.requests for crowd in known.curve[:3]] == [1, 2, 3]
    means = [crowd.mean_blocks for crowd in known.curve[:3]]
    assert means == pytest.approx([3.5, 2 * 3.5 - 2, 3 * 3.5 - 4], abs=0.1)


def test_a_prompt_takes_a_step_for_each_chunk(session: SessionBuilder) -> None:
    """80 tokens in chunks of 20 are 4 steps in 5 blocks; 16 steps of the answer have 6."""
    pool(session, 100, max_num_batched_tokens=20)
    requests(session, (1, 2), prompt=80, computed=96)
    assert room(session).mean_blocks == pytest.approx((4 * 5 + 16 * 6) / 20, abs=0.03)


def test_what_was_found_takes_no_step(session: SessionBuilder) -> None:
    pool(session, 100, max_num_batched_tokens=20)
    requests(session, (1, 2), prompt=80, computed=96, hit_tokens=64)
    assert room(session).mean_blocks == pytest.approx((5 + 16 * 6) / 17, abs=0.03)


def test_who_finds_no_place_waits(session: SessionBuilder) -> None:
    """Requests of 4 blocks: 5 fit into 20. Eight are there at once, the ninth is alone."""
    pool(session, 20, max_num_seqs=3)
    requests(session, *[(1, 3)] * 8, (5, 6), prompt=64, computed=64)
    known = room(session)
    assert known.fit == 5
    waits = {(one.pool_blocks, one.max_num_seqs): one.waiting_share for one in known.settings}
    assert waits == {
        (10, 3): 6 / 9,
        (10, 5): 6 / 9,
        (20, 3): 5 / 9,
        (20, 5): 3 / 9,
        (40, 3): 5 / 9,
        (40, 5): 3 / 9,
    }
    assert {one.fit for one in known.settings} == {2, 5, 10}


def test_one_grows_into_the_blocks_of_the_newest(session: SessionBuilder) -> None:
    """Two requests that take 1 block and then 2, in a pool of 2: there is always room for both to
    begin, and never for one to grow while the other one is there. The other one has a block for
    one step of 17, and else two."""
    pool(session, 2)
    requests(session, *[(1, 2)] * 4, prompt=16, computed=32)
    two = next(crowd for crowd in room(session).crowds if crowd.requests == 4)
    # A request grows by a block, which is always missing, and a victim frees one of at most 2.
    assert 0.5 <= two.preemptions <= 1


def test_how_many_were_there_at_once(session: SessionBuilder) -> None:
    """Two at 1 s, a third at 2 s when one ends at that moment, and nobody from 5 to 6 s."""
    requests(session, (1, 2), (1, 5), (2, 4), (6, 7))
    (day,) = found(session).days
    assert day.date == "2026-01-31"
    assert (day.requests, day.peak_requests, day.peak_sec) == (4, 2, 1)
    # Of 5 s with any request, 3 s had two.
    assert day.p99_requests == 2


def test_each_day_has_its_peak(session: SessionBuilder) -> None:
    """The clock is 12:00 at second 0, so midnight is at 43,200 s and at 129,600 s."""
    session.metadata(ended_at="2026-02-02T12:00:00Z")
    requests(session, (10, 20), (15, 20), (43_190, 130_000), (43_205, 43_206), (43_205, 43_207))
    days = [
        (day.date, day.requests, day.peak_requests, day.peak_sec) for day in found(session).days
    ]
    assert days == [
        ("2026-01-31", 3, 2, 15),
        ("2026-02-01", 2, 3, 43_205),
        ("2026-02-02", 0, 1, 129_600),
    ]
    # The request that stays is alone for nearly all of the second day.
    assert [day.p99_requests for day in found(session).days] == [2, 1, 1]


def test_days_without_a_wall_clock_are_counted(session: SessionBuilder) -> None:
    session.metadata(started_at=None)
    requests(session, (1, 2))
    (day,) = found(session).days
    assert (day.date, day.peak_requests) == (None, 1)


def test_what_a_smaller_max_model_len_cuts_off(session: SessionBuilder) -> None:
    """Prompts of 100, 128 and 200 tokens; with their answers 130, 129 and 512."""
    requests(session, (1, 2), prompt=100, computed=129)
    requests(session, (3, 4), prompt=128, computed=128)
    requests(session, (5, 6), prompt=200, computed=511)
    longest = found(session).longest
    assert longest is not None
    assert (longest.requests, longest.tokens) == (3, 771)
    assert (longest.p50_tokens, longest.p99_tokens, longest.most_tokens) == (130, 512, 512)
    cuts = {
        cut.max_model_len: (cut.refused, cut.refused_tokens, cut.cut, cut.cut_tokens)
        for cut in longest.by_length
    }
    # 512 itself cuts nothing. A prompt of 128 tokens leaves no room for an answer in 128.
    assert cuts == {256: (0, 0, 1, 256), 128: (2, 641, 1, 2)}


def test_memory_that_was_never_used(session: SessionBuilder) -> None:
    """Of 100 blocks up to 40 were held; at another time 70 were held or cached."""
    session.metadata(groups=[{**METADATA["groups"][0], "bytes_per_block": 1_000}])
    state = {"total_blocks": 100, "usage_pct": 1}
    session.rows(
        "kv_cache_usage.csv",
        {"timestamp_sec": 1, "num_blocks": 40, "cached_blocks": 10, "free_blocks": 50, **state},
        {"timestamp_sec": 2, "num_blocks": 5, "cached_blocks": 65, "free_blocks": 30, **state},
    )
    (unused,) = found(session).unused
    assert (unused.held, unused.never_held, unused.never_held_bytes) == (40, 60, 60_000)
    assert (unused.taken, unused.never_taken, unused.never_taken_bytes) == (70, 30, 30_000)


def test_several_groups_have_no_room_that_is_known(session: SessionBuilder) -> None:
    session.metadata(groups=[*METADATA["groups"], {"kind": "MambaSpec", "block_size": 16}])
    requests(session, (1, 2))
    known = found(session)
    assert known.room is None
    assert known.longest is not None
    assert [day.peak_requests for day in known.days] == [1]


def test_a_session_without_a_request(session: SessionBuilder) -> None:
    assert found(session) == HeadRoom(None, (), None, ())


def test_the_warm_up_does_not_count(session: SessionBuilder) -> None:
    """A request of the warm-up is there at once with the next, and else counts for nothing."""
    requests(session, (1, 8), prompt=640, computed=640)
    requests(session, (5, 6), prompt=32, computed=32)
    known = summarize(open_session(session.folder, after_sec=4)).head_room
    assert known.room is not None
    assert (known.room.requests, known.room.mean_blocks) == (1, 2)
    assert known.longest is not None
    assert known.longest.most_tokens == 33
    (day,) = known.days
    assert (day.requests, day.peak_requests, day.peak_sec) == (1, 2, 5)


def test_in_words(session: SessionBuilder) -> None:
    pool(session, 20, max_num_seqs=3)
    requests(session, *[(1, 3)] * 8, (5, 6), prompt=64, computed=64)
    said = text.render(summarize(open_session(session.folder)))
    section = " ".join(said[said.index("Head room") :].split())
    assert "A running request 4.0 blocks at a moment; 99 % up to 4; an answer adds 0.0" in section
    assert "Fit at once 5 requests into 20 blocks but for 1 % of the time; 5 but for" in section
    assert "8 requests 32 32 100.00 % 0.000" in section
    assert "Peak 2026-01-31 8 in an engine at 1.00 s; up to 8 for 99 % of the time;" in section
    assert "1.60 times what fits" in section
    assert "20 blocks 3 5 55.56 % 0" in section
    assert "Prompt and answer 65 tokens (median), 99 % up to 65, the longest 65" in section
    assert "64 9 585 0 0" in section
