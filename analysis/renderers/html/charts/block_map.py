# SPDX-License-Identifier: Apache-2.0
"""What each block was doing, as far as evictions show."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Chart, axis, time_axis, times
from analysis.renderers.html.report import Report
from analysis.wording.formats import seconds, share


def charts(report: Report) -> Iterator[Chart]:
    heading = "Which blocks were in use, and which kept content for reuse?"
    look = (
        "Long bands that are kept and then lost are content that nobody came back for; rows in "
        "constant use are blocks that turn over with each request."
    )
    found = report.series.block_map
    if found is None:
        nothing = (
            "No cached block was evicted, and the tables name blocks only where one is evicted."
        )
        yield Chart("block-map", heading, look, nothing)
        return
    per_row = found.blocks_per_row
    several = (
        f" This is pool {found.pool} of engine {found.engine}, the one with the most evictions."
        if report.series.pools.pools > 1
        else ""
    )
    neighbours = f"{per_row} neighbouring blocks" if per_row > 1 else "one block"
    evictions = report.summary.evictions.by_engine[found.engine].blocks
    words = (
        f"Rebuilt from {evictions:,} evictions, so a block is known only up to its last one, and "
        "not where it is free or still there at the end. "
        f"{share(found.known_share)} of the pool's time is known; the rest is grey. A cell is "
        f"{neighbours} over {seconds(report.series.bins.width_sec)}; pauses between two uses count "
        f"as use.{several}"
    )
    figure = {
        "data": [
            {
                "type": "heatmap",
                "x": times(report.series.bins.middles),
                "y0": (per_row - 1) / 2,
                "dy": per_row,
                "z": [
                    [_kept_percent(*cell) for cell in zip(used, kept, strict=True)]
                    for used, kept in zip(found.used, found.kept, strict=True)
                ],
                "zmin": 0,
                "zmax": 100,
                "colorscale": [
                    [0, "var(--held)"],
                    [0.5, "var(--between)"],
                    [1, "var(--cached)"],
                ],
                "colorbar": {
                    "tickvals": [0, 100],
                    "ticktext": ["in use", "kept for reuse"],
                    "orientation": "h",
                    "thickness": 12,
                    "y": 1.02,
                    "yanchor": "bottom",
                    "len": 0.8,
                    "outlinewidth": 0,
                },
                "hovertemplate": "block %{y:.0f}, %{x:.2f} s: kept for reuse %{z} % of it"
                "<extra></extra>",
            }
        ],
        "layout": {
            "xaxis": time_axis(report.series.bins, showgrid=False),
            "yaxis": axis("block id", showgrid=False),
            "plot_bgcolor": "var(--free)",
        },
    }
    yield Chart("block-map", heading, look, words, figure, over_time=True, height=460)


def _kept_percent(used: int, kept: int) -> int | None:
    """Of what is known of a cell, the percentage in which its content was kept for reuse; None
    where most of it is not known."""
    both = used + kept
    return round(100 * kept / both) if both >= 50 else None
