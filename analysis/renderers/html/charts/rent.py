# SPDX-License-Identifier: Apache-2.0
"""Which requests held how much of the cache for how long."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment, Table, bar_label
from analysis.renderers.html.report import Report
from analysis.wording.printable import abridged


def charts(report: Report) -> Iterator[Chart]:
    yield _rent(report)


def _rent(report: Report) -> Chart:
    heading = "Which requests took the most of the cache?"
    look = (
        "Rent that is paid after the end is content kept for others: worth it where they found "
        "tokens in it, wasted where not."
    )
    rent = report.summary.rent
    if not rent.top:
        return Chart("rent", heading, look, "No request held a block.")
    labels = [bar_label(renter.request_id) for renter in rent.top]
    phases = (
        ("until its first token", [renter.waiting for renter in rent.top], "regret"),
        ("answering", [renter.decoding for renter in rent.top], "held"),
        ("not ended", [renter.running for renter in rent.top], "free"),
        ("kept after its end", [renter.kept for renter in rent.top], "cached"),
    )
    segments = [Segment(name, values, colour) for name, values, colour in phases if any(values)]
    approximate = "" if rent.exact else " Figures by request are approximate."
    return Chart(
        "rent",
        heading,
        look,
        f"The pools held {rent.pool_held:,.0f} block-seconds and kept {rent.pool_kept:,.0f} "
        f"without a holder, in which {rent.saved_tokens:,} prompt tokens were found. Drawn: the "
        f"{len(rent.top):,} of {rent.renters:,} requests with the most.{approximate}",
        Bars(labels, [f"{renter.total:,.0f}" for renter in rent.top], segments, "blocks × seconds"),
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
