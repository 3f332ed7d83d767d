# SPDX-License-Identifier: Apache-2.0
"""What a chart is made of, and what the charts have in common.

A chart is a plotly.js figure as a plain dictionary, with words around it that say the same. Colours
are names of the page's style sheet ("var(--held)"), which the page's script looks up, so that a
chart follows the theme. Text that comes out of the session goes through ``safe``.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.series.bins import Bins
from analysis.wording.printable import printable, shortened
from profilemate.format.marks import Mark

Figure = dict[str, Any]

SECONDS = "seconds since the session began"
LONGEST_MARK = 30
"""Characters of a mark beside its line."""
LONGEST_LABEL = 60
"""Characters of a request's id beside its bar."""


@dataclass(frozen=True)
class Table:
    """Figures for people who do not see the chart: the first column names the rest."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Segment:
    """One segment of every bar: its name, a value for each bar, and its colour."""

    name: str
    values: Sequence[float]
    colour: str


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, the first on top: for each a label and its figure as text, and the
    segments that it consists of. ``unit``: what the lengths stand for; ``mark``: a value to show
    across."""

    labels: Sequence[str]
    texts: Sequence[str]
    segments: Sequence[Segment]
    unit: str
    mark: float | None = None


@dataclass(frozen=True)
class Chart:
    """One chart of the page.

    ``key``: its id in the page. ``heading``: a question or a statement. ``look``: what to look
    for, one sentence. ``words``: what the chart shows, in figures. ``figure``: None where there is
    nothing to draw, which ``words`` then explains. ``over_time``: its x axis is the session's
    time, so it zooms together with the others. ``height``: in CSS pixels.
    """

    key: str
    heading: str
    look: str
    words: str
    figure: Figure | Bars | None = None
    table: Table | None = None
    over_time: bool = False
    height: int = 320


@dataclass(frozen=True)
class Section:
    """Charts that belong together, under a heading."""

    key: str
    heading: str
    charts: Sequence[Chart]


def safe(text: str) -> str:
    """Text out of the session, for a chart: plotly.js reads tags and entities in its texts."""
    return html.escape(printable(text), quote=False)


def bar_label(request_id: str) -> str:
    """A request's id, as long as it fits beside its bar."""
    return shortened(request_id, LONGEST_LABEL)


def axis(title: str, **more: Any) -> Figure:
    """An axis with a title; ``more``: other properties of plotly's axes."""
    return {"title": {"text": title}, "automargin": True, **more}


def time_axis(bins: Bins, **more: Any) -> Figure:
    """The x axis of a chart over the session's time, all of it."""
    return axis(SECONDS, range=[bins.begin_sec, bins.end_sec], **more)


def begun_at(chart: Chart, begin_sec: float) -> Chart:
    """The chart with its time from ``begin_sec`` on, if it is one over the session's time. Zooming
    out shows what came before."""
    if not chart.over_time or not isinstance(chart.figure, dict):
        return chart
    layout = chart.figure["layout"]
    time = layout["xaxis"]
    shown = {**time, "range": [begin_sec, time["range"][1]]}
    return replace(chart, figure={**chart.figure, "layout": {**layout, "xaxis": shown}})


def with_marks(chart: Chart, marks: Sequence[Mark]) -> Chart:
    """The chart with a line at each of these moments, if it is one over the session's time."""
    if not chart.over_time or not isinstance(chart.figure, dict):
        return chart
    layout = chart.figure["layout"]
    lines = [
        {
            "type": "line",
            "yref": "paper",
            "x0": mark.at_sec,
            "x1": mark.at_sec,
            "y0": 0,
            "y1": 1,
            "line": {"color": "var(--text)", "width": 1, "dash": "dot"},
        }
        for mark in marks
    ]
    texts = [
        {
            "x": mark.at_sec,
            "y": 1,
            "yref": "paper",
            "xanchor": "left",
            "yanchor": "top",
            "text": safe(shortened(mark.text, LONGEST_MARK)),
            "showarrow": False,
            "bgcolor": "var(--card)",
        }
        for mark in marks
    ]
    marked = {
        **layout,
        "shapes": [*layout.get("shapes", ()), *lines],
        "annotations": [*layout.get("annotations", ()), *texts],
    }
    return replace(chart, figure={**chart.figure, "layout": marked})


def count_axis(title: str, **more: Any) -> Figure:
    """An axis that begins at 0."""
    return axis(title, rangemode="tozero", **more)


def line(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: str, **more: Any
) -> Figure:
    """A line through one value a bin; it breaks where nothing is known."""
    style = {"color": f"var(--{colour})", "width": 2, **more.pop("line", {})}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": [rounded(value) for value in y],
        "line": style,
        **more,
    }


def band(
    x: Sequence[float],
    low: Sequence[float | None],
    high: Sequence[float | None],
    colour: str,
    **more: Any,
) -> Iterator[Figure]:
    """The room between the lowest and the highest value of each bin."""
    edge = {"line": {"width": 0}, "showlegend": False, **more}
    yield line("highest", x, high, colour, **edge)
    filled = {"fill": "tonexty", "fillcolor": f"var(--{colour}-band)"}
    yield line("lowest", x, low, colour, **edge, **filled)


def most(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: str, **more: Any
) -> Figure:
    """The highest value of each bin, dotted, beside a line that shows the mean."""
    return line(name, x, y, colour, line={"dash": "dot", "width": 1.5}, showlegend=False, **more)


def stacked(name: str, x: Sequence[float], y: Sequence[float | None], colour: str) -> Figure:
    """An area on top of the ones before it."""
    return line(
        name, x, y, colour, stackgroup="all", fillcolor=f"var(--{colour})", line={"width": 0.5}
    )


def panels(count: int, gap: float = 0.08) -> list[tuple[float, float]]:
    """Where ``count`` panels lie above each other, as shares of the height, the first on top."""
    height = (1 - gap * (count - 1)) / count
    bottoms = [(count - 1 - index) * (height + gap) for index in range(count)]
    return [(round(bottom, 4), round(bottom + height, 4)) for bottom in bottoms]


def rounded(value: float | None) -> float | None:
    """Five significant digits: more than a pixel shows, and a third of the bytes."""
    return None if value is None else float(f"{value:.5g}")


def times(middles: Sequence[float]) -> list[float]:
    """Times for an x axis, to the microsecond as in the tables."""
    return [round(middle, 6) for middle in middles]


def known(values: Iterable[float | None]) -> bool:
    """Whether there is any value to draw."""
    return any(value is not None for value in values)
