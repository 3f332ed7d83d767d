# SPDX-License-Identifier: Apache-2.0
"""Which requests evicted what others needed."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Bars, Chart, Segment, Table, bar_label
from analysis.renderers.html.charts.evictions import lost
from analysis.renderers.html.report import Report
from analysis.wording.formats import seconds, share
from analysis.wording.printable import abridged


def charts(report: Report) -> Iterator[Chart]:
    if report.summary.evictions.total.blocks:
        yield _evictors(report)


def _evictors(report: Report) -> Chart:
    heading = "Which requests evicted what others needed?"
    look = (
        "A few long bars are requests to keep apart (long prompts that come once); many short "
        "ones are a pool that is too small for all."
    )
    blame = report.summary.blame
    worst = [evictor for evictor in blame.worst if evictor.recomputed_tokens]
    if not worst:
        none = "Nothing that was evicted for room had to be computed again."
        return Chart("evictors", heading, look, f"{none}{lost(report)}")
    names = [evictor.request_id or "not known" for evictor in worst]
    labels = [bar_label(evicted_for) for evicted_for in names]
    costs = [evictor.recomputed_tokens for evictor in worst]
    texts = [f"{cost:,}" for cost in costs]
    sweepers = blame.sweepers
    swept = (
        f" {sweepers.requests:,} of these requests came once, and nobody used what they left: they "
        f"cost {share(sweepers.share)} of these tokens."
        if sweepers.requests
        else ""
    )
    return Chart(
        "evictors",
        heading,
        look,
        f"{blame.recomputed_tokens:,} tokens were computed again because {blame.evictors:,} "
        f"requests had evicted them; drawn are the {len(worst):,} that cost most.{swept}"
        f"{lost(report)}",
        Bars(
            labels, texts, [Segment("tokens", costs, "regret")], "tokens that others computed again"
        ),
        Table(
            ("Request", "evicted blocks", "asked for again", "tokens", "by requests", "after"),
            [
                (
                    abridged(evicted_for),
                    f"{evictor.evicted_blocks:,}",
                    f"{evictor.regretted_blocks:,}",
                    f"{evictor.recomputed_tokens:,}",
                    f"{evictor.requests:,}",
                    seconds(evictor.after_p50_sec),
                )
                for evicted_for, evictor in zip(names, worst, strict=True)
            ],
        ),
    )
