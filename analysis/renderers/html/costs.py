# SPDX-License-Identifier: Apache-2.0
"""What preemptions cost, and which requests held the cache."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Part, Table
from analysis.renderers.html.regret import ID
from analysis.renderers.html.report import Report
from analysis.renderers.text.layout import shortened
from analysis.requests.preemptions import Preemption
from analysis.wording.formats import abridged, seconds, share


def charts(report: Report) -> Iterator[Chart]:
    yield _preemptions(report)
    yield _rent(report)


def _preemptions(report: Report) -> Chart:
    heading = "What did preemptions cost?"
    look = (
        "Tokens that a preempted request computed a second time are pure loss; one request with "
        "many of them may not fit at all."
    )
    bill = report.summary.preemptions
    if not bill.count:
        return Chart("preemptions", heading, look, "No running request was preempted.")
    told = bill.costliest
    if not told:
        return Chart(
            "preemptions",
            heading,
            look,
            f"{bill.count:,} preemptions; none of these requests was admitted again and ended, so "
            "what they cost is not told.",
        )
    labels = [
        f"{shortened(preemption.request_id, ID)} at {seconds(preemption.preempted_sec)}"
        for preemption in told
    ]
    costs = [preemption.recomputed_tokens for preemption in told]
    return Chart(
        "preemptions",
        heading,
        look,
        f"{bill.count:,} preemptions; {bill.recomputed_tokens:,} tokens were computed again for "
        f"them, {share(bill.tax)} of all, and the requests lost {seconds(bill.lost_sec)} "
        f"together. Drawn: the {len(told):,} that cost most.",
        Bars(
            labels,
            [f"{cost:,}" for cost in costs],
            [Part("tokens", costs, "regret")],
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
                for preemption in told
            ],
        ),
    )


def _beneficiary(preemption: Preemption) -> str:
    if preemption.by_itself:
        return "itself"
    return abridged(preemption.made_room_for or "not told")


def _rent(report: Report) -> Chart:
    heading = "Which requests took the most of the cache?"
    look = (
        "Rent that is paid after the end is content kept for others: worth it where they found "
        "tokens in it, wasted where not."
    )
    rent = report.summary.rent
    if not rent.top:
        return Chart("rent", heading, look, "No request held a block.")
    labels = [shortened(renter.request_id, ID) for renter in rent.top]
    phases = (
        ("until its first token", [renter.waiting for renter in rent.top], "regret"),
        ("answering", [renter.decoding for renter in rent.top], "held"),
        ("not ended", [renter.running for renter in rent.top], "free"),
        ("kept after its end", [renter.kept for renter in rent.top], "cached"),
    )
    parts = [Part(name, values, colour) for name, values, colour in phases if any(values)]
    approximate = "" if rent.exact else " By request these are approximate."
    return Chart(
        "rent",
        heading,
        look,
        f"The pools held {rent.pool_held:,.0f} block-seconds and kept {rent.pool_kept:,.0f} "
        f"without a holder, in which {rent.saved_tokens:,} prompt tokens were found. Drawn: the "
        f"{len(rent.top):,} of {rent.renters:,} requests with the most.{approximate}",
        Bars(labels, [f"{renter.total:,.0f}" for renter in rent.top], parts, "blocks × seconds"),
        Table(
            ("Block-seconds", "until 1st token", "answering", "not ended", "kept", "tokens saved"),
            [
                (
                    abridged(renter.request_id),
                    f"{renter.waiting:,.0f}",
                    f"{renter.decoding:,.0f}",
                    f"{renter.running:,.0f}",
                    f"{renter.kept:,.0f}",
                    "n/a" if renter.shared_tokens is None else f"{renter.shared_tokens:,}",
                )
                for renter in rent.top
            ],
        ),
    )
