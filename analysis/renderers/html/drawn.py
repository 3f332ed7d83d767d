# SPDX-License-Identifier: Apache-2.0
"""A chart of the page as a figure of Plotly's own, which shows itself in a notebook."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from plotly.graph_objects import Figure as PlotlyFigure

from analysis.renderers.html.chart import Bars, Chart, Figure, axis, safe
from analysis.renderers.html.frame import asset

_TITLE = 80
"""CSS pixels above what is drawn, for the heading and the legend."""

_COLOUR = re.compile(r"--([a-z-]+): light-dark\(#([0-9a-f]+), #([0-9a-f]+)\)")
_NAMED = re.compile(r"var\(--([a-z-]+)\)")


def figure(chart: Chart, *, dark: bool = False) -> PlotlyFigure:
    """The chart under its heading, in the colours of the page's light or dark theme.

    One without anything to draw has the words that say why.
    """
    if chart.figure is None:
        drawn = _nothing(chart.words)
    elif isinstance(chart.figure, Bars):
        drawn = _bars(chart.figure)
    else:
        drawn = chart.figure
    colours = _colours(dark)
    painted: Figure = _painted({"data": drawn["data"], "layout": _layout(chart, drawn)}, colours)
    return PlotlyFigure(painted)


@cache
def _colours(dark: bool) -> dict[str, str]:
    """By name, the colours of the page's style sheet."""
    found = _COLOUR.findall(asset("page.css"))
    return {name: _rgba(night if dark else day) for name, day, night in found}


def _rgba(digits: str) -> str:
    """Plotly takes no hexadecimal colour that can be seen through."""
    red, green, blue, *rest = bytes.fromhex(digits)
    return f"rgba({red},{green},{blue},{rest[0] / 255 if rest else 1:.3g})"


def _painted(part: Any, colours: dict[str, str]) -> Any:
    """The part with colours in place of their names."""
    if isinstance(part, str):
        named = _NAMED.fullmatch(part)
        return colours[named[1]] if named else part
    if isinstance(part, dict):
        return {name: _painted(value, colours) for name, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_painted(value, colours) for value in part]
    return part


def _layout(chart: Chart, drawn: Figure) -> Figure:
    """What the page's script adds to a layout, and the heading."""
    layout = {
        name: {"gridcolor": "var(--rule)", "linecolor": "var(--soft)", "zeroline": False, **value}
        if re.fullmatch(r"[xy]axis\d*", name)
        else value
        for name, value in drawn["layout"].items()
    }
    return {
        "title": {"text": safe(chart.heading), "x": 0, "xref": "paper", "yref": "container"}
        | {"y": 0.98, "yanchor": "top", "font": {"size": 16}},
        "paper_bgcolor": "var(--card)",
        "plot_bgcolor": "var(--card)",
        "font": {"size": 13, "color": "var(--text)"},
        "margin": {"l": 50, "r": 12, "t": _TITLE, "b": 40},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
        | {"traceorder": "normal", "font": {"size": 12}},
        "separators": ".,",
        "height": chart.height + _TITLE,
        **layout,
    }


def _bars(bars: Bars) -> Figure:
    """The page draws bars by itself; here Plotly does."""
    places = list(range(len(bars.labels)))
    last = bars.segments[-1] if bars.segments else None
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": safe(segment.name),
            "x": list(segment.values),
            "y": places,
            "marker": {"color": f"var(--{segment.colour})"},
            "showlegend": len(bars.segments) > 1,
            # The figure of the whole bar stands behind its last segment.
            **({"text": [*map(safe, bars.texts)]} if segment is last else {}),
            **({"textposition": "outside", "cliponaxis": False} if segment is last else {}),
        }
        for segment in bars.segments
    ]
    ticks = {"tickvals": places, "ticktext": [*map(safe, bars.labels)], "autorange": "reversed"}
    layout: Figure = {
        "barmode": "stack",
        "xaxis": axis(bars.unit, rangemode="tozero"),
        "yaxis": {"automargin": True, **ticks},
    }
    if bars.mark is not None:
        line = {"color": "var(--text)", "width": 2}
        across = {"x0": bars.mark, "x1": bars.mark, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [{"type": "line", **across, "line": line}]
    return {"data": data, "layout": layout}


def _nothing(words: str) -> Figure:
    """Words alone."""
    place = {"x": 0, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top"}
    said = {"text": safe(words), "showarrow": False, **place}
    hidden = {"visible": False}
    return {"data": [], "layout": {"annotations": [said], "xaxis": hidden, "yaxis": hidden}}
