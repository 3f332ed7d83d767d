# SPDX-License-Identifier: Apache-2.0
"""How deep prompts share their beginnings."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.renderers.html.chart import Chart, Table, axis, line
from analysis.renderers.html.report import Report
from analysis.series.depths import Depth


def charts(report: Report) -> Iterator[Chart]:
    yield _sharing(report)


def _sharing(report: Report) -> Chart:
    heading = "How deep do prompts share their beginnings?"
    look = (
        "The gap between the lines is what a cache that forgets nothing would have found on top; "
        "where the upper line falls, prompts part, and no cache setting helps beyond that."
    )
    found = report.series.depths
    if not found.depths:
        return Chart(
            "sharing",
            heading,
            look,
            "No request that ended has a full block of prompt with a content id (with prefix "
            "caching off there are none), or engines have blocks of different sizes.",
        )
    depths = found.depths
    x = [depth.tokens for depth in depths]
    text = [f"{depth.prompts:,} prompts are that long" for depth in depths]
    data = [
        line(
            name,
            x,
            y,
            colour,
            mode="lines+markers",
            text=text,
            hovertemplate=f"%{{x:,}} tokens: %{{y:.1f}} % {what}<br>%{{text}}<extra></extra>",
            line={"dash": dash},
        )
        for name, y, colour, dash, what in (
            (
                "shared with another prompt",
                [100 * depth.shareable / depth.prompts for depth in depths],
                "cached",
                "dash",
                "could have found that much",
            ),
            (
                "found in the cache",
                [100 * depth.found / depth.prompts for depth in depths],
                "held",
                "solid",
                "found that much",
            ),
        )
    ]
    first = depths[0]
    return Chart(
        "sharing",
        heading,
        look,
        f"Of {first.prompts:,} prompts with a full block of {first.tokens:,} tokens, "
        f"{first.shareable:,} begin with a block that another one had before, and {first.found:,} "
        "found it. The table has the same for longer beginnings.",
        {
            "data": data,
            "layout": {
                "xaxis": axis(
                    "first tokens (logarithmic)",
                    type="log",
                    tickvals=x,
                    ticktext=[f"{tokens:,}" for tokens in x],
                ),
                "yaxis": axis("% of prompts that long", range=[0, 103]),
            },
        },
        Table(
            ("First tokens", "prompts", "beginnings", "shared", "found", "most frequent"),
            [_depth(depth) for depth in depths],
        ),
    )


def _depth(depth: Depth) -> tuple[str, ...]:
    figures = (depth.prompts, depth.distinct, depth.shareable, depth.found, depth.hottest)
    return (f"{depth.tokens:,}", *(f"{figure:,}" for figure in figures))
