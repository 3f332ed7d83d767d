# SPDX-License-Identifier: Apache-2.0
"""Charts over time begin where the load does, and no flag is divided."""

from __future__ import annotations

import pytest

from analysis import open_session, series, summarize
from analysis.renderers.html.elements import prose
from analysis.renderers.html.page import render, sections_of
from analysis.renderers.html.report import Report
from tests.analysis.builder import SessionBuilder


def report_of(session: SessionBuilder, first_sec: float, **options: float) -> Report:
    """Of a session of 20 seconds whose first block is handed out then."""
    session.usage((first_sec, 50), (20, 0))
    opened = open_session(session.folder, **options)  # type: ignore[arg-type]
    summary = summarize(opened)
    return Report(summary, series.measure(opened, summary))


def ranges(report: Report) -> set[tuple[float, float]]:
    return {
        tuple(chart.figure["layout"]["xaxis"]["range"])
        for section in sections_of(report)
        for chart in section.charts
        if chart.over_time and isinstance(chart.figure, dict)
    }


@pytest.mark.parametrize(
    ("first_sec", "begin_sec"), [(10.0, pytest.approx(9.8)), (0.5, 0.0), (0.0, 0.0)]
)
def test_they_begin_a_little_before_the_first_request(
    session: SessionBuilder, first_sec: float, begin_sec: float
) -> None:
    report = report_of(session, first_sec)
    assert [*ranges(report)] == [(begin_sec, 20.0)]
    said = "They begin with the first request, at 9.80 s; zoom out for what came before."
    assert (said in render(report.summary, report.series)) == (first_sec == 10.0)


def test_a_warm_up_that_is_left_out_is_no_beginning(session: SessionBuilder) -> None:
    assert ranges(report_of(session, 2.0, after_sec=12.0)) == {(12.0, 20.0)}


def test_no_line_ends_within_a_flag() -> None:
    said = "Raise --max-num-seqs <16> or --a, but not a--b, nor ---."
    assert prose(said) == (
        'Raise <span class="flag">--max-num-seqs</span> &lt;16&gt; or '
        '<span class="flag">--a</span>, but not a--b, nor ---.'
    )
