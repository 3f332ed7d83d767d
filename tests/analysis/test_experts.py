# SPDX-License-Identifier: Apache-2.0
"""Which experts are used: the figures, on sessions small enough to count by hand."""

from __future__ import annotations

from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.gpu.experts import Experts, gini
from analysis.renderers.text.summary import render
from tests.analysis.builder import SessionBuilder
from tests.analysis.moe import COUNTED, counted, paired, with_experts


def measured(session: SessionBuilder, **options: Any) -> Experts:
    return summarize(open_session(session.folder, **options)).experts


@pytest.fixture
def two_layers(session: SessionBuilder) -> SessionBuilder:
    """In 10 s, two layers of four experts."""
    with_experts(session)
    return session


def test_how_much_and_how_unevenly(two_layers: SessionBuilder) -> None:
    found = measured(two_layers)
    first, second = found.layers
    assert (first.layer, first.tokens, first.by_expert) == (0, 10, (8, 6, 4, 2))
    assert (first.busiest, first.busiest_share, first.max_over_mean) == (0, 0.4, 1.6)
    assert first.cv == pytest.approx(5**0.5 / 5)
    assert first.gini == pytest.approx(0.25)
    assert (first.unused, first.moved_share) == (0, 0)
    assert second.by_expert == (5, 10, 5, 0)
    assert (second.busiest, second.unused) == (1, 1)
    assert found.mean_max_over_mean == pytest.approx((1.6 + 2) / 2)
    assert found.mean_gini == pytest.approx((0.25 + 0.375) / 2)
    assert found.unused_share == 1 / 8


def test_how_much_moved(two_layers: SessionBuilder) -> None:
    # Expert 0 had half of the tokens, and expert 2 has half of them now.
    assert measured(two_layers).layers[1].moved_share == 0.5


def test_workers_are_added_up(two_layers: SessionBuilder) -> None:
    counted(two_layers, (9, 1, 3, "0 0 0 6"), worker=1)
    second = measured(two_layers).layers[1]
    assert (second.tokens, second.by_expert) == (13, (5, 10, 5, 6))


def test_after_the_warm_up(two_layers: SessionBuilder) -> None:
    (first, second) = measured(two_layers, after_sec=5).layers
    assert (first.tokens, second.by_expert) == (5, (0, 5, 5, 0))
    assert second.moved_share is None


def test_gini() -> None:
    assert gini([]) == gini([0, 0]) == 0
    # By its definition: half of the mean difference of two, divided by the mean.
    counts = [3, 9, 0, 7, 7]
    differences = sum(abs(one - other) for one in counts for other in counts)
    mean = sum(counts) / 5
    assert gini(counts) == pytest.approx(differences / 25 / mean / 2)


def test_pairs_are_those_of_the_last_report(two_layers: SessionBuilder) -> None:
    paired(two_layers, 2, (0, 0, 1, 30, 10))
    paired(two_layers, 8, (0, 2, 3, 40, 10))
    paired(two_layers, 8, (1, 0, 3, 25, 5))
    paired(two_layers, 8, (1, 0, 1, 4, 5))
    paired(two_layers, 7, (0, 2, 3, 40, 10), worker=1)
    found = measured(two_layers).pairs
    # The last one of the first worker is no more often there than by chance.
    assert [(pair.layer, pair.expert, pair.other_expert) for pair in found] == [
        (0, 2, 3),
        (1, 0, 3),
    ]
    assert [(pair.tokens, pair.expected_tokens) for pair in found] == [(80, 20), (25, 5)]
    assert [(pair.ratio, pair.share) for pair in found] == [(4, 0.4), (5, 0.25)]


def test_the_section(two_layers: SessionBuilder) -> None:
    paired(two_layers, 8, (1, 0, 3, 25, 5))
    text = render(summarize(open_session(two_layers.folder)))
    section = text.partition("\nExperts\n")[2].partition("\n\n")[0]
    for line in (
        "with 4 experts each, 2 for each token",
        "Unused              12.50 %  1 experts of all layers",
        "Layer 0                     0  40.00 %    1.60  0.45  0.25       0  0.00 %",
        "Layer 1                     1  50.00 %    2.00  0.71  0.38       1  50.00 %",
        "Layer 1: 0, 3             25  25.00 %          5   5.00",
    ):
        assert " ".join(line.split()) in " ".join(section.split()), section


def test_without_experts_there_is_no_section(session: SessionBuilder) -> None:
    assert measured(session).layers == ()
    assert "\nExperts\n" not in render(summarize(open_session(session.folder)))


def test_why_there_are_none(session: SessionBuilder) -> None:
    session.metadata(experts={"problem": "vLLM divides a batch in two"})
    assert "Not counted: vLLM divides a batch in two." in render(
        summarize(open_session(session.folder))
    )


def test_balancedness_of_ranks(session: SessionBuilder) -> None:
    session.metadata(experts={**COUNTED, "ranks": 2, "eplb": True})
    counted(session, (1, 0, 5, "4 3 2 1"), by_rank="7 3")
    counted(session, (1, 1, 5, "5 5 0 0"), by_rank="10 0")
    counted(session, (2, 0, 5, "4 3 2 1"), by_rank="7 3", worker=1)
    found = measured(session)
    assert (found.ranks, found.has_eplb) == (2, True)
    assert [layer.by_rank for layer in found.layers] == [(14, 6), (10, 0)]
    # The means are 10 and 5, the busiest have 14 and 10.
    assert found.balancedness == 15 / 24
    text = render(summarize(open_session(session.folder)))
    section = text.partition("\nExperts\n")[2].partition("\n\n")[0]
    assert "Balancedness        0.62  mean load of 2 expert-parallel ranks over" in section
    assert "EPLB moves experts" in section


def test_without_ranks_there_is_no_balancedness(two_layers: SessionBuilder) -> None:
    found = measured(two_layers)
    assert (found.ranks, found.has_eplb, found.balancedness) == (None, False, None)
    assert "Balancedness" not in render(summarize(open_session(two_layers.folder)))
