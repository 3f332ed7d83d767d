# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from analysis import open_session, summarize
from analysis.prefix.request_ages import AgeBin, RequestAges
from analysis.renderers.text import summary as text
from tests.analysis.builder import SessionBuilder
from tests.analysis.stories import swept


def test_ages_at_hits_beside_ages_at_evictions(session: SessionBuilder) -> None:
    """A2 found three blocks 1.5 s after A began, B one 2.5 s after A2, C three 3 s after B; B also
    asked for two that it did not find."""
    swept(session)
    ages = summarize(open_session(session.folder)).ages
    assert ages.at_hit.count == 7
    assert {(bin.from_sec, bin.count) for bin in ages.at_hit.bins} == {(1.0, 3), (2.0, 4)}
    assert ages.at_hit.p50_sec == 2.5
    # Idle for 0.5, 0.5, 2.5, 3 and 4 s: what came back after 3 s came later than the median.
    assert ages.at_eviction.p50_sec == 2.5
    assert (ages.reuses, ages.later) == (9, 3)
    assert ages.later_share == pytest.approx(1 / 3)


def test_without_an_eviction_nothing_is_late(session: SessionBuilder) -> None:
    swept(session)
    (session.folder / "kv_cache_evictions.csv").unlink()
    ages = summarize(open_session(session.folder)).ages
    assert (ages.reuses, ages.later, ages.later_share) == (9, None, None)
    assert ages.at_eviction.bins == ()


def test_ages_in_requests(session: SessionBuilder) -> None:
    """Requests came at 1, 2.5, 3, 5 and 8 s. A2 is the next after A, and C after B; between A2 and
    B came S. What was evicted at 5.001 s after 3 s idle had seen A2, S and B come."""
    swept(session)
    ages = summarize(open_session(session.folder)).ages
    hit, evicted = ages.at_hit_requests, ages.at_eviction_requests
    assert [(one.least, one.most, one.count) for one in hit.bins] == [(1, 1, 6), (2, 3, 1)]
    assert (hit.count, hit.p50, hit.p95, hit.most) == (ages.at_hit.count, 1, 2, 2)
    assert [(one.least, one.most, one.count) for one in evicted.bins] == [(1, 1, 2), (2, 3, 3)]
    assert (evicted.count, evicted.p50, evicted.p95, evicted.most) == (5, 2, 3, 3)


def test_a_pause_is_no_age_in_requests(session: SessionBuilder) -> None:
    """Nothing came for 5 s before 8 s: what was idle meanwhile is as old as it was."""
    swept(session)
    session.evictions(
        {"timestamp_sec": 9.5, "idle_sec": 0.5}, {"timestamp_sec": 9.9, "idle_sec": 1.5}
    )
    ages = summarize(open_session(session.folder)).ages.at_eviction_requests
    assert ages.bins[0] == AgeBin(0, 0, 2)


def test_each_engine_has_requests_of_its_own(session: SessionBuilder) -> None:
    swept(session)
    session.evictions({"timestamp_sec": 9, "idle_sec": 8.5, "engine": 1})
    session.evictions({"timestamp_sec": 9, "idle_sec": 8.5, "engine": 0})
    ages = summarize(open_session(session.folder)).ages.at_eviction_requests
    assert (ages.bins[0].count, ages.most) == (1, 5)


def test_resets_have_no_age(session: SessionBuilder) -> None:
    swept(session)
    session.evictions({"timestamp_sec": 9, "idle_sec": 8.5, "reason": "reset"})
    assert summarize(open_session(session.folder)).ages.at_eviction_requests.count == 5


def test_without_anything_there_is_no_age_in_requests(session: SessionBuilder) -> None:
    ages = summarize(open_session(session.folder)).ages
    nothing = RequestAges(0, None, None, None, ())
    assert (ages.at_hit_requests, ages.at_eviction_requests) == (nothing, nothing)


def test_ages_in_requests_in_words(session: SessionBuilder) -> None:
    swept(session)
    said = " ".join(text.render(summarize(open_session(session.folder))).split())
    assert (
        "In requests that came meanwhile: found again after 1 (median; 95 % within 2), evicted "
        "after 2 (median)." in said
    )
