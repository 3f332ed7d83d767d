# SPDX-License-Identifier: Apache-2.0
"""How fast blocks were evicted, how old they were, and which evictions were a loss."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import (
    Chart,
    Table,
    count_axis,
    line,
    rounded,
    stacked,
    time_axis,
    times,
)
from analysis.renderers.html.histograms import age_axis, histogram, spread_table
from analysis.renderers.html.report import Report
from analysis.wording.formats import seconds, share
from analysis.wording.misses import LOST

NOTHING = "No cached block was evicted."

_COLOURS = {"reallocated": "cached", "explicit": "held", "reset": "free"}
_REASONS = {
    "reallocated": "their room was needed",
    "explicit": "vLLM was asked to evict them",
    "reset": "the prefix cache was reset",
}


def charts(report: Report) -> Iterator[Chart]:
    yield _rate(report)
    yield _ages(report)
    if report.summary.evictions.total.blocks:
        yield _regret(report)


def _rate(report: Report) -> Chart:
    heading = "When were cached blocks evicted?"
    look = (
        "A steady rate is a pool that new content flows through; a burst is one request or one "
        "change of load, and what it swept out is missing afterwards."
    )
    evictions, rate = report.summary.evictions, report.series.eviction_rate
    if not evictions.total.blocks:
        return Chart("eviction-rate", heading, look, NOTHING)
    x = times(report.series.bins.middles)
    data = [
        stacked(_reason(reason), x, values, _COLOURS.get(reason, "green"))
        for reason, values in rate.mean.items()
    ]
    part = seconds(report.series.bins.width_sec / rate.parts)
    if rate.parts > 1:
        data.append(line(f"busiest {part}", x, rate.busiest, "regret", line={"width": 1}))
    rows = [
        (_reason(reason), f"{evicted.blocks:,}", f"{evicted.never_reused:,}")
        for reason, evicted in evictions.by_reason.items()
    ]
    causes = [f"{blocks} because {reason}" for reason, blocks, _ in rows]
    return Chart(
        "eviction-rate",
        heading,
        look,
        f"{evictions.total.blocks:,} blocks were evicted: {', '.join(causes)}. The highest rate "
        f"was {max(rate.busiest):,.0f} blocks a second, for {part}.",
        {
            "data": data,
            "layout": {
                "xaxis": time_axis(report.series.bins),
                "yaxis": count_axis("blocks evicted a second"),
                "hovermode": "x unified",
            },
        },
        Table(("Evicted because", "blocks", "of these never reused"), rows),
        over_time=True,
    )


def _reason(reason: str) -> str:
    return _REASONS.get(reason, "of another reason")


def _ages(report: Report) -> Chart:
    heading = "How old were evicted blocks, and for how long had nobody used them?"
    look = (
        "Lifetimes of a few seconds mean that content goes before a second request can find it; "
        "where idle time is nearly the whole lifetime, nobody came back for it."
    )
    lived = report.summary.lifetimes
    spreads = (("Lifetime", lived.lifetime), ("Idle before eviction", lived.idle))
    if not lived.lifetime.count:
        return Chart("ages", heading, look, "No cached block was evicted for its room.")
    styles = (("held", "solid"), ("cached", "dash"))
    return Chart(
        "ages",
        heading,
        look,
        f"Half of the evicted blocks had lived for less than {seconds(lived.lifetime.p50_sec)}, "
        f"and half had been idle for less than {seconds(lived.idle.p50_sec)}.",
        {
            "data": [
                histogram(name, spread.bins, colour, dash)
                for (name, spread), (colour, dash) in zip(spreads, styles, strict=True)
            ],
            "layout": {
                "xaxis": age_axis(*lived.lifetime.bins, *lived.idle.bins),
                "yaxis": count_axis("% of evicted blocks"),
            },
        },
        spread_table(spreads),
    )


def lost(report: Report) -> str:
    """What was asked for again and lost on purpose, a sentence each; empty where nothing was."""
    return "".join(
        f" {LOST[reason]}: {part.blocks:,} blocks that were asked for again, and "
        f"{part.recomputed_tokens:,} tokens that were computed again."
        for reason, part in report.summary.evictions.on_purpose.items()
    )


def _regret(report: Report) -> Chart:
    evictions = report.summary.evictions
    rate, regretted = evictions.rate, evictions.regretted
    begins = [interval.begin_sec for interval in rate.intervals]
    width = rate.width_sec
    parts = (
        ("asked for again", [interval.regretted for interval in rate.intervals], "regret"),
        (
            "others",
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
        f"({share(regretted.share)}) had been evicted for room and were asked for again{again}. "
        f"{evictions.total.copies_left:,} were copies of content that another block still held."
        f"{lost(report)}",
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
