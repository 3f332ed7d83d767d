# SPDX-License-Identifier: Apache-2.0
"""When each request waited, computed its prompt, and answered."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Chart, Figure, Table, axis, rounded, safe, time_axis
from analysis.renderers.html.report import Report
from analysis.series.bins import Bins
from analysis.series.timeline import Span, Timeline
from analysis.wording.formats import seconds
from analysis.wording.printable import abridged

SLOWEST = 10


def charts(report: Report) -> Iterator[Chart]:
    heading = "What did requests spend their time on?"
    look = (
        "Long waits before the first token are what users feel; bars that grow to the right are "
        "a queue that builds up."
    )
    timeline = report.series.timeline
    if not timeline.spans:
        yield Chart("timeline", heading, look, "No request ended in the session.")
        return
    drawn = (
        f"one of every {timeline.one_in:,} of the {timeline.ended:,} requests that ended"
        if timeline.one_in > 1
        else f"all {timeline.ended:,} requests that ended"
    )
    yield Chart(
        "timeline",
        heading,
        look,
        f"Drawn: {drawn}, by arrival. {_words(timeline)}",
        _figure(timeline, report.series.bins),
        _slowest(timeline),
        over_time=True,
        height=520,
    )


def _figure(timeline: Timeline, bins: Bins) -> Figure:
    spans = timeline.spans
    text = [_hover(span) for span in spans]
    phases = (
        ("waiting", "free", [(span.arrived_sec, _admitted(span)) for span in spans]),
        ("until its first token", "cached", [(_admitted(span), _first(span)) for span in spans]),
        ("answering", "held", [(_first(span), span.ended_sec) for span in spans]),
    )
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": list(range(1, len(spans) + 1)),
                "base": [round(begin, 4) for begin, _ in times],
                "x": [rounded(max(0.0, end - begin)) for begin, end in times],
                "customdata": text,
                "hovertemplate": f"%{{customdata}}<br>{name}: %{{x:.3f}} s<extra></extra>",
                "marker": {"color": f"var(--{colour})", "line": {"width": 0}},
            }
            for name, colour, times in phases
        ],
        "layout": {
            "barmode": "overlay",
            "bargap": 0.1,
            "xaxis": time_axis(bins),
            "yaxis": axis("requests drawn, by arrival", autorange="reversed"),
        },
    }


def _admitted(span: Span) -> float:
    return span.ended_sec if span.admitted_sec is None else span.admitted_sec


def _first(span: Span) -> float:
    return span.ended_sec if span.first_token_sec is None else span.first_token_sec


def _hover(span: Span) -> str:
    preempted = f", preempted {span.preemptions:,} times" if span.preemptions else ""
    return (
        f"{safe(abridged(span.request_id))}<br>{span.input_tokens:,} tokens in "
        f"({span.hit_tokens:,} from the cache), {span.output_tokens:,} "
        f"out{preempted}<br>ended: {safe(span.finish_reason)}"
    )


def _words(timeline: Timeline) -> str:
    parts = [
        ("waiting", sum(_admitted(span) - span.arrived_sec for span in timeline.spans)),
        ("until the first token", sum(_first(span) - _admitted(span) for span in timeline.spans)),
        ("answering", sum(span.ended_sec - _first(span) for span in timeline.spans)),
    ]
    count = len(timeline.spans)
    means = ", ".join(f"{seconds(total / count)} {name}" for name, total in parts)
    return f"On average these spent {means}."


def _slowest(timeline: Timeline) -> Table:
    """Of the requests drawn, those that users waited for longest."""
    slowest = sorted(timeline.spans, key=lambda span: span.arrived_sec - _first(span))[:SLOWEST]
    return Table(
        (
            "Slowest of those drawn",
            "arrived",
            "first token after",
            "ended after",
            "tokens in",
            "out",
        ),
        [
            (
                abridged(span.request_id),
                seconds(span.arrived_sec),
                "none"
                if span.first_token_sec is None
                else seconds(_first(span) - span.arrived_sec),
                seconds(span.ended_sec - span.arrived_sec),
                f"{span.input_tokens:,}",
                f"{span.output_tokens:,}",
            )
            for span in slowest
        ],
    )
