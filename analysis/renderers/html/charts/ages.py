# SPDX-License-Identifier: Apache-2.0
"""Whether contents come back sooner than they are evicted."""

from __future__ import annotations

import math
from collections.abc import Iterator

from analysis.prefix.request_ages import RequestAges
from analysis.renderers.html.chart import Chart, Figure, axis, count_axis, panels, rounded
from analysis.renderers.html.histograms import age_axis, histogram, spread_table
from analysis.renderers.html.report import Report
from analysis.wording.formats import seconds, share


def charts(report: Report) -> Iterator[Chart]:
    yield _ages(report)


def _ages(report: Report) -> Chart:
    heading = "Is the cache large enough for what comes back?"
    look = (
        "Where the ages at a hit lie left of the ages at eviction, there is room for what is "
        "asked for again; where they meet, a larger pool finds more."
    )
    ages = report.summary.ages
    spreads = [
        (name, spread)
        for name, spread in (("At a hit", ages.at_hit), ("At eviction", ages.at_eviction))
        if spread.count
    ]
    if not spreads:
        nothing = "No block was found in the cache, and none was evicted."
        return Chart("age-at-hit", heading, look, nothing)
    counted = [
        (name, found)
        for name, found in (
            ("At a hit", ages.at_hit_requests),
            ("At eviction", ages.at_eviction_requests),
        )
        if found.count
    ]
    top, bottom = panels(2, gap=0.25) if counted else ((0.0, 1.0), (0.0, 0.0))
    styles = {"At a hit": ("green", "solid"), "At eviction": ("cached", "dash")}
    words = " ".join(
        f"{name}, half of the blocks had last been used within {seconds(spread.p50_sec)}."
        for name, spread in spreads
    )
    if ages.at_hit_requests.p50 is not None and ages.at_eviction_requests.p50 is not None:
        words += (
            f" In requests that came meanwhile, half had an age of up to "
            f"{ages.at_hit_requests.p50:,} at a hit, and of up to "
            f"{ages.at_eviction_requests.p50:,} at eviction."
        )
    if ages.later_share is not None:
        words += (
            f" {share(ages.later_share)} of the {ages.reuses:,} blocks that were asked for again "
            "came back later than that: after half of the evicted blocks had gone."
        )
    return Chart(
        "age-at-hit",
        heading,
        look,
        words,
        {
            "data": [
                *(histogram(name, spread.bins, *styles[name]) for name, spread in spreads),
                *(_steps(name, found, *styles[name]) for name, found in counted),
            ],
            "layout": {
                "xaxis": age_axis(*(found for _, spread in spreads for found in spread.bins)),
                "yaxis": count_axis("% of blocks", domain=top),
                **_second(bottom, counted),
            },
        },
        spread_table(spreads),
        height=480 if counted else 320,
    )


def _second(domain: tuple[float, float], counted: list[tuple[str, RequestAges]]) -> Figure:
    """The axes of the ages in requests; none where no such age is known."""
    if not counted:
        return {}
    edges = sorted({found.least for _, ages in counted for found in ages.bins})
    marks = {
        "tickvals": [_place(edge) for edge in edges],
        "ticktext": [f"{edge:,}" for edge in edges],
    }
    return {
        "xaxis2": axis("requests that came meanwhile (logarithmic)", anchor="y2", **marks),
        "yaxis2": count_axis("% of blocks", domain=domain, anchor="x2"),
    }


def _steps(name: str, ages: RequestAges, colour: str, dash: str) -> Figure:
    """Ages in requests, as steps as wide as their bins."""
    x = [edge for found in ages.bins for edge in (_place(found.least), _place(found.most + 1))]
    y = [rounded(100 * found.count / ages.count) for found in ages.bins for _ in range(2)]
    texts = [f"{found.least:,} to {found.most:,} requests" for found in ages.bins]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name.lower()}, in requests",
        "x": x,
        "y": y,
        "xaxis": "x2",
        "yaxis": "y2",
        "text": [text for text in texts for _ in range(2)],
        "hovertemplate": "%{text}: %{y:.2f} %<extra>%{fullData.name}</extra>",
        "line": {"color": f"var(--{colour})", "width": 2, "dash": dash},
        "fill": "tozeroy",
        "fillcolor": f"var(--{colour}-band)",
        "showlegend": False,
    }


def _place(age: int) -> float:
    """Where an age stands on an axis of doublings, on which 0 and 1 lie one apart."""
    return math.log2(age) + 1 if age else 0.0
