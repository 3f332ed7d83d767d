# SPDX-License-Identifier: Apache-2.0
"""What the charts are given: plotly knows every name in it, and the page has what it is made of."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch

import pytest
import tomllib
from plotly import graph_objects

from analysis import open_session, series, summarize
from analysis.renderers.html import chart, elements, page
from analysis.renderers.html.report import Report
from tests.analysis.builder import SessionBuilder
from tests.report.conftest import ROOT

HTML = ROOT / "analysis" / "renderers" / "html"


@pytest.fixture(scope="module")
def charts(busy: SessionBuilder) -> list[chart.Chart]:
    session = open_session(busy.folder)
    summary = summarize(session)
    report = Report(summary, series.measure(session, summary))
    return [part for section in page.sections_of(report) for part in section.charts]


def test_plotly_knows_every_name(charts: list[chart.Chart]) -> None:
    drawn = [part.figure for part in charts if isinstance(part.figure, dict)]
    assert len(drawn) > 8
    colours = set()
    for figure in drawn:
        text = json.dumps(figure)
        colours |= set(re.findall(r"var\((--[a-z-]+)\)", text))
        graph_objects.Figure(json.loads(re.sub(r"var\(--[a-z-]+\)", "red", text)))
    style = (HTML / "page.css").read_text()
    for colour in colours:
        assert f"  {colour}: light-dark(" in style


def test_a_series_has_as_many_points_however_long_it_is(charts: list[chart.Chart]) -> None:
    for part in charts:
        if part.over_time and part.key not in ("timeline", "regret", "load", "block-map"):
            assert isinstance(part.figure, dict)
            assert {len(trace["x"]) for trace in part.figure["data"]} == {360}, part.key


def test_a_wheel_has_what_the_page_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["analysis.renderers.html"]
    files = [path for path in HTML.iterdir() if path.is_file() and path.suffix != ".py"]
    assert {"page.html", "page.css", "page.js"} <= {path.name for path in files}
    for path in files:
        assert any(fnmatch(path.name, pattern) for pattern in patterns), path


def test_no_tag_can_begin_in_the_data() -> None:
    hostile = {"data": [{"text": "</script><!--<script>&"}]}
    part = chart.Chart("key", "", "", "", hostile)
    data = elements.data([chart.Section("", "", [part])])
    assert not set("<>&") & set(data)
    assert json.loads(data)["key"]["data"] == hostile["data"]


def test_text_of_a_session_is_no_markup() -> None:
    assert chart.safe("<b>&lt;\u202e") == "&lt;b&gt;&amp;lt;\\u202e"
