# SPDX-License-Identifier: Apache-2.0
"""Why requests waited, and what a full pool does to them."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Part, Table
from analysis.renderers.html.report import Report
from analysis.renderers.text.scheduling import BANDS
from analysis.renderers.text.waiting import name_of
from analysis.wording.formats import percent, seconds, share


def charts(report: Report) -> Iterator[Chart]:
    yield _reasons(report)
    yield _pressure(report)


def _reasons(report: Report) -> Chart:
    heading = "What did waiting requests wait for?"
    look = (
        "Waiting for blocks is mended by cache; waiting for a place or for tokens of a step while "
        "blocks are free is mended by the scheduler's limits."
    )
    waiting = report.summary.waiting
    if not waiting.by_reason:
        return Chart("waiting", heading, look, "No request waited at the end of a step.")
    scheduler = report.summary.facts.scheduler
    reasons = waiting.by_reason
    labels = [name_of(name, scheduler) for name in reasons]
    waited = [reason.request_sec for reason in reasons.values()]
    texts = [
        f"{seconds(reason.request_sec)} ({share(reason.share)})" for reason in reasons.values()
    ]
    return Chart(
        "waiting",
        heading,
        look,
        f"Requests waited {seconds(waiting.request_sec)} in all, up to {waiting.most:,} at once.",
        Bars(labels, texts, [Part("waited", waited, "regret")], "requests waiting × seconds"),
        Table(
            ("Reason", "waited", "of it", "pool's usage then"),
            [
                (
                    label,
                    seconds(reason.request_sec),
                    share(reason.share),
                    percent(reason.usage_pct),
                )
                for label, reason in zip(labels, reasons.values(), strict=True)
            ],
        ),
    )


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
    labels = [BANDS[part.band] for part in known]
    times = [part.first_token_p95_sec or 0.0 for part in known]
    texts = [f"{seconds(part.first_token_p95_sec)} ({part.arrived:,} requests)" for part in known]
    return Chart(
        "pressure",
        heading,
        look,
        "Of the requests that arrived while so much of the pool was held, 95 % had their first "
        "token within that time.",
        Bars(labels, texts, [Part("first token", times, "held")], "seconds to the first token"),
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
                    BANDS[part.band],
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
