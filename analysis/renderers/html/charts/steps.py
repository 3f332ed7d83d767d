# SPDX-License-Identifier: Apache-2.0
"""How large the scheduler's steps were."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import (
    Chart,
    Table,
    count_axis,
    known,
    line,
    most,
    panels,
    stacked,
    time_axis,
    times,
)
from analysis.renderers.html.report import Report
from analysis.wording.formats import seconds


def charts(report: Report) -> Iterator[Chart]:
    heading = "How large were the scheduler's steps?"
    look = (
        "Steps full of prompt tokens delay the answers that share them; few requests in a step "
        "while others wait is a batch that could be larger."
    )
    steps, x = report.series.steps, times(report.series.bins.middles)
    if not known(steps.requests_mean):
        yield Chart("steps", heading, look, "No step scheduled a token.")
        return
    top, bottom = panels(2)
    second = {"yaxis": "y2", "stackgroup": "tokens"}
    figure = {
        "data": [
            line("requests", x, steps.requests_mean, "green"),
            most("requests, most", x, steps.requests_high, "green"),
            stacked("answer tokens", x, steps.decode_mean, "held") | second,
            stacked("prompt tokens", x, steps.prefill_mean, "cached") | second,
            most("tokens, most", x, steps.tokens_high, "regret", yaxis="y2"),
        ],
        "layout": {
            "xaxis": time_axis(report.series.bins, anchor="y2"),
            "yaxis": count_axis("requests a step", domain=top),
            "yaxis2": count_axis("tokens a step", domain=bottom),
            "hovermode": "x unified",
        },
    }
    most_requests = max(value for value in steps.requests_high if value is not None)
    most_tokens = max(value for value in steps.tokens_high if value is not None)
    rows = [("Most requests in a step", f"{most_requests:,}"), ("Most tokens", f"{most_tokens:,}")]
    yield Chart(
        "steps",
        heading,
        look,
        f"Of {report.summary.preemptions.steps:,} steps, the largest had {most_requests:,} "
        f"requests and the largest {most_tokens:,} tokens. Lines and areas are means over "
        f"{seconds(report.series.bins.width_sec)}, dotted is the largest step "
        "in that time; steps that scheduled nothing are left out.",
        figure,
        Table(("", ""), rows),
        over_time=True,
        height=440,
    )
