# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from analysis import open_session, summarize
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
