# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import open_session
from analysis.pool import fragmentation, usage
from analysis.pool.fragmentation import Fragmentation
from analysis.tables import facts
from tests.analysis.builder import SessionBuilder


def fragmentation_of(session: SessionBuilder) -> Fragmentation | None:
    opened = open_session(session.folder)
    return fragmentation.measure(opened, facts.read(opened), usage.measure(opened))


def request(prompt: int, computed: int, **other: Any) -> dict[str, Any]:
    """Admitted at 1 s, first token at 2 s, ended at 4 s; in blocks of 16 tokens."""
    return {
        "input_length": prompt,
        "computed_tokens": computed,
        "num_blocks": -(-computed // 16),
        "preemptions": 0,
        "queue_sec": 1,
        "first_token_sec": 2,
        "finish_sec": 4,
        **other,
    }


def test_what_is_empty_at_the_end_and_over_time(session: SessionBuilder) -> None:
    """14 tokens of prompt for 1 s, then 15, 16, 17 and 18 for half a second each: 14 + 33 token
    seconds; 16 + 0.5 * (16 + 16 + 32 + 32) = 64 slot seconds. At the end 18 of 32 slots."""
    session.requests(request(14, 18))
    session.usage((0, 50))
    found = fragmentation_of(session)
    assert found is not None
    assert (found.requests, found.slots, found.empty_slots) == (1, 32, 14)
    assert found.actual.block_size == 16
    assert found.actual.at_end == pytest.approx(14 / 32)
    assert found.actual.over_time == pytest.approx(1 - 47 / 64)
    assert found.filled_at_peak_pct == pytest.approx(50 * 47 / 64)
    small = found.by_block_size[0]
    # In blocks of 8: 16, then 16, 16, 24 and 24 slots.
    assert (small.block_size, small.at_end) == (8, 1 - 18 / 24)
    assert small.over_time == pytest.approx(1 - 47 / (16 + 0.5 * 80))


def test_requests_that_held_nothing_or_were_preempted(session: SessionBuilder) -> None:
    """One never ran, one was aborted while it was preempted; a third was preempted before: its
    end is known, its life is not."""
    session.requests(
        request(100, 0, num_blocks=0, queue_sec=None, first_token_sec=None),
        request(100, 100, num_blocks=0, preemptions=1),
        request(10, 30, preemptions=1),
    )
    found = fragmentation_of(session)
    assert found is not None
    assert (found.requests, found.slots, found.empty_slots) == (1, 32, 2)
    assert found.actual.over_time is None
    assert found.filled_at_peak_pct is None


def test_other_groups_and_no_requests_say_nothing(session: SessionBuilder) -> None:
    assert fragmentation_of(session) is None
    session.requests(request(14, 18))
    assert fragmentation_of(session) is not None
    session.metadata(groups=[{"kind": "MambaSpec", "block_size": 16}])
    assert fragmentation_of(session) is None


requests = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=5)


@given(requests=requests)
def test_shares_are_those_of_counting_token_by_token(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[int, int]]
) -> None:
    session = SessionBuilder(tmp_path_factory.mktemp("session"))
    session.requests(*(request(prompt, prompt + grown) for prompt, grown in requests))
    found = fragmentation_of(session)
    assert found is not None
    for empty in found.by_block_size:
        size = empty.block_size
        tokens = slots = end_tokens = end_slots = 0.0
        for prompt, grown in requests:
            lives = [(prompt, 1.0)]
            lives += [(prompt + n, 2 / grown) for n in range(1, grown + 1)] or [(prompt, 2.0)]
            tokens += sum(count * time for count, time in lives)
            slots += sum(-(-count // size) * size * time for count, time in lives)
            end_tokens += prompt + grown
            end_slots += -(-(prompt + grown) // size) * size
        assert empty.over_time == pytest.approx(1 - tokens / slots, abs=1e-12)
        assert empty.at_end == pytest.approx(1 - end_tokens / end_slots, abs=1e-12)
