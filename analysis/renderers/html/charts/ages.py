# SPDX-License-Identifier: Apache-2.0
"""Whether contents come back sooner than they are evicted."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Chart, count_axis
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
    styles = {"At a hit": ("green", "solid"), "At eviction": ("cached", "dash")}
    words = " ".join(
        f"{name}, half of the blocks had last been used within {seconds(spread.p50_sec)}."
        for name, spread in spreads
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
            "data": [histogram(name, spread.bins, *styles[name]) for name, spread in spreads],
            "layout": {
                "xaxis": age_axis(*(found for _, spread in spreads for found in spread.bins)),
                "yaxis": count_axis("% of blocks"),
            },
        },
        spread_table(spreads),
    )
