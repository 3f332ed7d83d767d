# SPDX-License-Identifier: Apache-2.0
"""What a full pool does to requests."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment, Table
from analysis.renderers.html.report import Report
from analysis.wording.bands import BANDS
from analysis.wording.formats import seconds


def charts(report: Report) -> Iterator[Chart]:
    yield _pressure(report)


def _pressure(report: Report) -> Chart:
    heading = "Does a full pool make requests slower?"
    look = (
        "First tokens that come later the fuller the pool was when a request arrived are the "
        "price of too little cache; bars alike have another cause."
    )
    bands = [part for part in report.summary.scheduling.by_pressure if part.arrived]
    known = [part for part in bands if part.first_token_p95_sec is not None]
    if not known:
        nothing = "No request that ended got a first token."
        return Chart("pressure", heading, look, nothing)
    labels = [f"{BANDS[part.band]} held" for part in known]
    times = [part.first_token_p95_sec or 0.0 for part in known]
    texts = [f"{seconds(part.first_token_p95_sec)} ({part.arrived:,} requests)" for part in known]
    return Chart(
        "pressure",
        heading,
        look,
        "Of the requests that arrived while so much of the pool was held, 95 % had their first "
        "token within that time.",
        Bars(labels, texts, [Segment("first token", times, "held")], "seconds to the first token"),
        Table(
            (
                "On arrival",
                "requests",
                "queued, median",
                "queued, 95 %",
                "first token, median",
                "first token, 95 %",
                "preemptions then",
            ),
            [
                (
                    f"{BANDS[part.band]} held",
                    f"{part.arrived:,}",
                    seconds(part.queued_p50_sec),
                    seconds(part.queued_p95_sec),
                    seconds(part.first_token_p50_sec),
                    seconds(part.first_token_p95_sec),
                    f"{part.preemptions:,}",
                )
                for part in bands
            ],
        ),
    )
