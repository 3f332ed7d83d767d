# SPDX-License-Identifier: Apache-2.0
"""Steps by phase: what is drawn is what the tables say."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Browser

from tests.analysis.builder import SessionBuilder
from tests.analysis.timed import with_gpu_time
from tests.report.conftest import made
from tests.report.opened import Opened
from tests.report.test_cuda_graphs import charts_of
from tests.report.test_page import drawn


def lines_of(session: SessionBuilder, key: str) -> dict[str, list[Any]]:
    """By name, the values of a chart's lines that are known."""
    figure = charts_of(session)[key].figure
    assert isinstance(figure, dict)
    return {
        trace["name"]: [value for value in trace["y"] if value is not None]
        for trace in figure["data"]
    }


def test_charts(session: SessionBuilder) -> None:
    with_gpu_time(session)
    assert lines_of(session, "step-phases") == {
        "prefill alone": [1000, 500],
        "mixed": [404],
        "decode alone": [4, 4, 2],
    }
    assert lines_of(session, "gpu-time") == {
        "prefill alone": [400, 200],
        "mixed": [300],
        "decode alone": [20, 40],
        "encoder": [100],
    }
    words = charts_of(session)["gpu-time"].words
    assert "5 steps of 1 worker took 960.0 ms on the GPU" in words
    assert "The encoder took 100.0 ms of that." in words


def test_without_gpu_time_its_chart_is_not_drawn(session: SessionBuilder) -> None:
    with_gpu_time(session)
    (session.folder / "gpu_steps.csv").unlink()
    charts = charts_of(session)
    assert "step-phases" in charts
    assert "gpu-time" not in charts


def test_one_phase_alone_is_not_drawn(session: SessionBuilder) -> None:
    session.rows(
        "scheduler_steps.csv",
        {"scheduled_tokens": 4, "prefill_tokens": 4, "decode_tokens": 0, "scheduled_reqs": 1},
    )
    assert {"step-phases", "gpu-time"}.isdisjoint(charts_of(session))


def test_it_is_drawn(browser: Browser, session: SessionBuilder) -> None:
    with_gpu_time(session)
    page = made(session.folder)
    with Opened(browser) as opened:
        shown = opened(page)
        assert [value for value in drawn(shown, "gpu-time")["mixed"]["y"] if value] == [300]
