# SPDX-License-Identifier: Apache-2.0
"""Which evictions were a loss, and which requests caused them."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import (
    Bars,
    Chart,
    Part,
    Table,
    count_axis,
    rounded,
    time_axis,
)
from analysis.renderers.html.report import Report
from analysis.renderers.text.layout import shortened
from analysis.wording.formats import abridged, seconds, share

ID = 60
"""Characters of a request's id beside its bar."""


def charts(report: Report) -> Iterator[Chart]:
    if report.summary.evictions.total.blocks:
        yield _regret(report)
        yield _evictors(report)


def _regret(report: Report) -> Chart:
    evictions = report.summary.evictions
    rate, regretted = evictions.rate, evictions.regretted
    begins = [interval.begin_sec for interval in rate.intervals]
    width = rate.width_sec
    parts = (
        ("asked for again", [interval.regretted for interval in rate.intervals], "regret"),
        (
            "not asked for again",
            [interval.blocks - interval.regretted for interval in rate.intervals],
            "free",
        ),
    )
    again = (
        f", half of them within {seconds(regretted.after.p50_sec)}, and "
        f"{regretted.recomputed_tokens:,} tokens were computed again for that"
        if regretted.blocks
        else ""
    )
    return Chart(
        "regret",
        "Which evictions were a loss?",
        "Content that is asked for again after its eviction has to be computed again; the rest "
        "was in nobody's way.",
        f"{regretted.blocks:,} of {evictions.total.blocks:,} evicted blocks "
        f"({share(regretted.share)}) were asked for again{again}. {evictions.total.copies_left:,} "
        "were copies of content that another block still held.",
        {
            "data": [
                {
                    "type": "bar",
                    "name": name,
                    "x": [begin + width / 2 for begin in begins],
                    "y": [rounded(blocks / width) for blocks in counts],
                    "width": width,
                    "marker": {"color": f"var(--{colour})", "line": {"width": 0}},
                }
                for name, counts, colour in parts
            ],
            "layout": {
                "barmode": "stack",
                "xaxis": time_axis(report.series.bins),
                "yaxis": count_axis("blocks evicted a second"),
                "hovermode": "x unified",
            },
        },
        Table(
            ("Evicted", "blocks", "never reused"),
            [
                (f"With {origin} in it", f"{part.blocks:,}", f"{part.never_reused:,}")
                for origin, part in evictions.by_origin.items()
            ],
        ),
        over_time=True,
    )


def _evictors(report: Report) -> Chart:
    heading = "Which requests evicted what others needed?"
    look = (
        "A few long bars are requests to keep apart (long prompts that come once); many short "
        "ones are a pool that is too small for all."
    )
    blame = report.summary.blame
    worst = [evictor for evictor in blame.worst if evictor.recomputed_tokens]
    if not worst:
        return Chart("evictors", heading, look, "No evicted content had to be computed again.")
    names = [evictor.request_id or "reset or explicit" for evictor in worst]
    labels = [shortened(evicted_for, ID) for evicted_for in names]
    costs = [evictor.recomputed_tokens for evictor in worst]
    texts = [f"{cost:,}" for cost in costs]
    sweepers = blame.sweepers
    swept = (
        f" {sweepers.requests:,} of them came once and left nothing that was used again: these "
        f"cost {share(sweepers.share)} of that."
        if sweepers.requests
        else ""
    )
    return Chart(
        "evictors",
        heading,
        look,
        f"{blame.recomputed_tokens:,} tokens were computed again because {blame.evictors:,} "
        f"requests had evicted them; drawn are the {len(worst):,} that cost most.{swept}",
        Bars(labels, texts, [Part("tokens", costs, "regret")], "tokens that others computed again"),
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
