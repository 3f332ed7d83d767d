# SPDX-License-Identifier: Apache-2.0
"""Why requests waited."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment, Table
from analysis.renderers.html.report import Report
from analysis.wording.formats import percent, seconds, share
from analysis.wording.waiting import reason_name


def charts(report: Report) -> Iterator[Chart]:
    yield _reasons(report)


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
    labels = [reason_name(name, scheduler) for name in reasons]
    waited = [reason.request_sec for reason in reasons.values()]
    texts = [
        f"{seconds(reason.request_sec)} ({share(reason.share)})" for reason in reasons.values()
    ]
    return Chart(
        "waiting",
        heading,
        look,
        f"Requests waited {seconds(waiting.request_sec)} in all, up to {waiting.most:,} at once.",
        Bars(labels, texts, [Segment("waited", waited, "regret")], "requests waiting × seconds"),
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
