# SPDX-License-Identifier: Apache-2.0
"""What preemptions cost."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment, Table, bar_label
from analysis.renderers.html.report import Report
from analysis.requests.preemptions import Preemption
from analysis.wording.formats import seconds, share
from analysis.wording.printable import abridged


def charts(report: Report) -> Iterator[Chart]:
    yield _preemptions(report)


def _preemptions(report: Report) -> Chart:
    heading = "What did preemptions cost?"
    look = (
        "Tokens that a preempted request computed a second time are pure loss; one request with "
        "many of them may not fit at all."
    )
    bill = report.summary.preemptions
    if not bill.count:
        return Chart("preemptions", heading, look, "No running request was preempted.")
    costliest = bill.costliest
    if not costliest:
        return Chart(
            "preemptions",
            heading,
            look,
            f"{bill.count:,} preemptions; none of these requests was admitted again and ended, so "
            "their cost is not known.",
        )
    labels = [
        f"{bar_label(preemption.request_id)} at {seconds(preemption.preempted_sec)}"
        for preemption in costliest
    ]
    costs = [preemption.recomputed_tokens for preemption in costliest]
    return Chart(
        "preemptions",
        heading,
        look,
        f"{bill.count:,} preemptions; {bill.recomputed_tokens:,} tokens were computed again for "
        f"them, {share(bill.tax)} of all, and the requests lost {seconds(bill.lost_sec)} "
        f"together. Drawn: the {len(costliest):,} that cost most.",
        Bars(
            labels,
            [f"{cost:,}" for cost in costs],
            [Segment("tokens", costs, "regret")],
            "tokens computed again",
        ),
        Table(
            ("Preempted", "at", "computed", "again", "lost", "room was made for"),
            [
                (
                    abridged(preemption.request_id),
                    seconds(preemption.preempted_sec),
                    f"{preemption.computed_tokens:,}",
                    f"{preemption.recomputed_tokens:,}",
                    seconds(preemption.lost_sec),
                    _beneficiary(preemption),
                )
                for preemption in costliest
            ],
        ),
    )


def _beneficiary(preemption: Preemption) -> str:
    if preemption.by_itself:
        return "itself"
    return abridged(preemption.made_room_for or "unknown")
