# SPDX-License-Identifier: Apache-2.0
"""How times that range from milliseconds to days are drawn: histograms on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterable

from analysis.renderers.html.chart import Figure, Table, axis, rounded
from analysis.stats.histograms import Bin
from analysis.stats.spread import Spread
from analysis.wording.formats import seconds


def histogram(name: str, bins: Iterable[Bin], colour: str, dash: str) -> Figure:
    """Steps as wide as the bins, in percent of all."""
    counted = list(bins)
    total = sum(found.count for found in counted)
    edges = [_edges(found) for found in counted]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name.lower(),
        "x": [edge for both in edges for edge in both],
        "y": [rounded(100 * found.count / total) for found in counted for _ in range(2)],
        "text": [_text(found) for found in counted for _ in range(2)],
        "hovertemplate": "%{text}: %{y:.2f} %<extra>%{fullData.name}</extra>",
        "line": {"color": f"var(--{colour})", "width": 2, "dash": dash},
        "fill": "tozeroy",
        "fillcolor": f"var(--{colour}-band)",
    }


def age_axis(*bins: Bin) -> Figure:
    """An axis for these bins, marked at powers of ten."""
    edges = [edge for found in bins for edge in _edges(found)]
    powers = range(math.floor(math.log10(min(edges))), math.ceil(math.log10(max(edges))) + 1)
    marks = {10.0**power: _mark(power) for power in powers}
    return axis(
        "time (logarithmic)", type="log", tickvals=list(marks), ticktext=list(marks.values())
    )


def spread_table(spreads: Iterable[tuple[str, Spread]]) -> Table:
    """The quantiles of each."""
    return Table(
        ("", "mean", "median", "90th pct.", "95th pct.", "99th pct.", "max"),
        [
            (
                name,
                *map(
                    seconds,
                    (
                        spread.mean_sec,
                        spread.p50_sec,
                        spread.p90_sec,
                        spread.p95_sec,
                        spread.p99_sec,
                        spread.max_sec,
                    ),
                ),
            )
            for name, spread in spreads
        ],
    )


def _edges(found: Bin) -> tuple[float, float]:
    """Where a bin begins and ends on an axis that has neither 0 nor an end."""
    if found.to_sec is None:
        return found.from_sec, 2 * found.from_sec
    return found.from_sec or found.to_sec / 2, found.to_sec


def _text(found: Bin) -> str:
    if found.to_sec is None:
        return f"{seconds(found.from_sec)} and more"
    return f"{seconds(found.from_sec)} to {seconds(found.to_sec)}"


def _mark(power: int) -> str:
    if power < 0:
        return f"{10 ** (power + 3):g} ms"
    return f"{10**power:,} s"
