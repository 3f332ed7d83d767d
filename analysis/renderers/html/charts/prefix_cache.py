# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache found."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import (
    Chart,
    Table,
    axis,
    count_axis,
    known,
    line,
    panels,
    rounded,
    time_axis,
    times,
)
from analysis.renderers.html.report import Report
from analysis.wording.formats import share


def charts(report: Report) -> Iterator[Chart]:
    yield _rate(report)


def _rate(report: Report) -> Chart:
    heading = "How much of the prompts came from the cache?"
    look = (
        "The line so far flattens; the rate of each moment shows whether the cache was still "
        "warming up, and when it lost what it had."
    )
    true, rate = report.summary.prefix_cache.true, report.series.hit_rate
    if not known(rate.so_far):
        off = report.summary.facts.prefix_caching is False
        nothing = "Prefix caching was off." if off else "No request was looked up and admitted."
        return Chart("hit-rate", heading, look, nothing)
    x = times(report.series.bins.middles)
    top, bottom = panels(2)
    width = report.series.bins.width_sec
    figure = {
        "data": [
            line(
                "at that moment",
                x,
                _percent(rate.in_bin),
                "cached",
                mode="lines+markers",
                marker={"size": 4},
                line={"width": 1},
            ),
            line("so far", x, _percent(rate.so_far), "held", line={"width": 3}),
            {
                "type": "bar",
                "name": "asked for",
                "x": x,
                "y": [rounded(tokens / width) for tokens in rate.query_tokens],
                "yaxis": "y2",
                "marker": {"color": "var(--free)", "line": {"width": 0}},
            },
        ],
        "layout": {
            "xaxis": time_axis(report.series.bins, anchor="y2"),
            "yaxis": axis("hit rate, %", range=[0, 102], domain=top),
            "yaxis2": count_axis("tokens asked for a second", domain=bottom),
            "hovermode": "x unified",
            "bargap": 0,
        },
    }
    return Chart(
        "hit-rate",
        heading,
        look,
        f"{share(true.token_rate)} of the prompt tokens were found: {true.hit_tokens:,} of "
        f"{true.query_tokens:,}. {share(true.request_rate)} of the requests found some: "
        f"{true.requests_hit:,} of {true.requests:,}.",
        figure,
        Table(
            ("", "found", "of", "rate"),
            [
                (
                    "Prompt tokens",
                    f"{true.hit_tokens:,}",
                    f"{true.query_tokens:,}",
                    share(true.token_rate),
                ),
                (
                    "Requests",
                    f"{true.requests_hit:,}",
                    f"{true.requests:,}",
                    share(true.request_rate),
                ),
            ],
        ),
        over_time=True,
        height=460,
    )


def _percent(rates: tuple[float | None, ...]) -> list[float | None]:
    return [None if rate is None else 100 * rate for rate in rates]
