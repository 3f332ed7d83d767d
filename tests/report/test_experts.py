# SPDX-License-Identifier: Apache-2.0
"""Experts: what is drawn is what the summary says."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Browser

from tests.analysis.builder import SessionBuilder
from tests.analysis.moe import paired, with_experts
from tests.report.conftest import made
from tests.report.opened import Opened
from tests.report.test_cuda_graphs import charts_of
from tests.report.test_page import drawn


def figure_of(session: SessionBuilder, key: str) -> dict[str, Any]:
    figure = charts_of(session)[key].figure
    assert isinstance(figure, dict)
    return figure


def test_a_cell_for_each_expert(session: SessionBuilder) -> None:
    with_experts(session)
    (trace,) = figure_of(session, "experts")["data"]
    # Of means of 5: 8, 6, 4 and 2 tokens, and 5, 10, 5 and none.
    assert trace["z"] == [[1.6, 1.2, 0.8, 0.4], [1, 2, 1, 0]]
    assert trace["y"] == ["layer 0", "layer 1"]
    found = charts_of(session)["experts"]
    assert "most in layer 1, where expert 1 has 2.00 times the mean" in found.words
    assert "1 experts got no token" in found.words
    assert found.table is not None
    assert found.table.rows[1][:5] == ("1", "10", "1", "50.00 %", "2.00")


def test_pairs(session: SessionBuilder) -> None:
    with_experts(session)
    paired(session, 1, (1, 0, 3, 25, 5))
    together, by_chance = figure_of(session, "expert-pairs")["data"]
    assert together["y"] == ["layer 1: 0, 3", "layer 0: 0, 1"]
    assert (together["x"], by_chance["x"]) == ([25, 30], [5, 10])


def test_without_experts_nothing_is_drawn(session: SessionBuilder) -> None:
    assert {"experts", "expert-pairs"}.isdisjoint(charts_of(session))


def test_it_is_drawn(browser: Browser, session: SessionBuilder) -> None:
    with_experts(session)
    page = made(session.folder)
    with Opened(browser) as opened:
        shown = opened(page)
        assert drawn(shown, "expert-pairs")["together"]["x"] == [30]
        cells = shown.evaluate(
            """() => Array.from(document.querySelector('[data-chart=experts]').data[0].z,
                row => Array.from(row))"""
        )
        assert cells == [[1.6, 1.2, 0.8, 0.4], [1, 2, 1, 0]]
        assert shown.locator("#experts .hm").count() == 1
        assert opened.trouble == []
