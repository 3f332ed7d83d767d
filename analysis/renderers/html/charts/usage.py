# SPDX-License-Identifier: Apache-2.0
"""How full the pool was, and how many requests ran and waited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

from analysis.pool.usage import PoolState, PoolUsage
from analysis.renderers.html.chart import (
    Chart,
    Figure,
    Table,
    axis,
    band,
    count_axis,
    known,
    line,
    most,
    panels,
    stacked,
    time_axis,
    times,
)
from analysis.renderers.html.report import Report
from analysis.series.pools import Level
from analysis.wording.bands import BANDS
from analysis.wording.formats import percent, seconds, share

NOTHING = "The session has no row of kv_cache_usage.csv: no block was ever held."


def charts(report: Report) -> Iterator[Chart]:
    yield _blocks(report)
    yield _load(report)
    yield _slots(report)


def _blocks(report: Report) -> Chart:
    heading = "What were the blocks doing?"
    look = (
        "The gap between the top and what is in use is the room for more requests; little of it "
        "free is no problem, as cached blocks are given up when their room is needed."
    )
    usage, pools = report.summary.usage.combined, report.series.pools
    if usage is None:
        return Chart("blocks", heading, look, NOTHING)
    x = times(report.series.bins.middles)
    several = f" of all {pools.pools} pools" if pools.pools > 1 else ""
    figure = {
        "data": [
            stacked("in use", x, pools.held, "held"),
            stacked("cached", x, pools.cached, "cached"),
            stacked("free", x, pools.free, "free"),
        ],
        "layout": {
            "xaxis": time_axis(report.series.bins),
            "yaxis": count_axis(f"blocks{several}"),
            "hovermode": "x unified",
        },
    }
    states = [("at the peak", usage.peak), ("at the end", usage.end)]
    words = "; ".join(f"{name} {_state(state)}" for name, state in states)
    return Chart(
        "blocks",
        heading,
        look,
        f"Blocks {words}. The chart shows means over {seconds(report.series.bins.width_sec)}.",
        figure,
        Table(
            ("", "time", "in use", "cached", "free"),
            [
                (
                    name.capitalize(),
                    seconds(state.timestamp_sec),
                    f"{state.held_blocks:,}",
                    f"{state.cached_blocks:,}",
                    f"{state.free_blocks:,}",
                )
                for name, state in states
            ],
        ),
        over_time=True,
    )


def _slots(report: Report) -> Chart:
    heading = "How many slots of the cache held a token?"
    look = (
        "Empty slots are room that is held and not used: many of them ask for smaller blocks, and "
        "few of all slots with a token for a smaller pool or more requests."
    )
    found = report.series.slots
    if found is None or not known(found.token):
        nothing = (
            "Not known: no request ended with blocks, or the model has several KV cache groups."
        )
        return Chart("slots", heading, look, nothing)
    x = times(report.series.bins.middles)
    held = [
        (token, empty)
        for token, empty in zip(found.token, found.empty, strict=True)
        if token is not None and empty is not None
    ]
    most_tokens = max(token for token, _ in held)
    empty = sum(empty for _, empty in held) / (sum(map(sum, held)) or 1.0)
    return Chart(
        "slots",
        heading,
        look,
        f"Requests held up to {most_tokens:,.0f} tokens (the mean of "
        f"{seconds(report.series.bins.width_sec)}); {share(empty)} of the slots in held blocks "
        "were empty. A request grows at an even pace here.",
        {
            "data": [
                stacked("tokens of requests", x, found.token, "held"),
                stacked("empty, in held blocks", x, found.empty, "regret"),
                stacked("cached", x, found.cached, "cached"),
                stacked("free", x, found.free, "free"),
            ],
            "layout": {
                "xaxis": time_axis(report.series.bins),
                "yaxis": count_axis("slots"),
                "hovermode": "x unified",
            },
        },
        Table(
            ("", "slots"),
            [
                ("Most tokens of requests", f"{most_tokens:,.0f}"),
                ("Most empty slots in held blocks", f"{max(empty for _, empty in held):,.0f}"),
            ],
        ),
        over_time=True,
    )


def _state(state: PoolState) -> str:
    return (
        f"({seconds(state.timestamp_sec)}): {state.held_blocks:,} in use, "
        f"{state.cached_blocks:,} cached, {state.free_blocks:,} free"
    )


def _load(report: Report) -> Chart:
    heading = "Did requests wait because the pool was full?"
    look = (
        "Requests that wait while usage is near 100 % wait for blocks; where usage is low, "
        "something else holds them back."
    )
    usage, pools = report.summary.usage.combined, report.series.pools
    if usage is None:
        return Chart("load", heading, look, NOTHING)
    x = times(report.series.bins.middles)
    top, bottom = panels(2)
    an_engine = " (an engine)" if pools.pools > 1 else ""
    preempted = report.series.steps.preempted
    figure = {
        "data": [
            *band(x, pools.usage.low, pools.usage.high, "held"),
            line("usage", x, pools.usage.mean, "held"),
            *_requests("running", x, pools.running, "purple"),
            *_requests("waiting", x, pools.waiting, "regret"),
            {
                "type": "scatter",
                "mode": "markers",
                "name": "preemptions",
                "x": [at for at, count in zip(x, preempted, strict=True) if count],
                "y": [103 for count in preempted if count],
                "text": [f"{count:,} preempted" for count in preempted if count],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": "var(--regret)", "symbol": "triangle-down", "size": 9},
            },
        ],
        "layout": {
            "xaxis": time_axis(report.series.bins, anchor="y2"),
            "yaxis": axis("usage, % of blocks", range=[0, 108], domain=top),
            "yaxis2": count_axis(f"requests{an_engine}", domain=bottom),
            "hovermode": "x unified",
        },
    }
    return Chart(
        "load", heading, look, _load_words(usage, report), figure, _bands(usage), True, height=460
    )


def _requests(name: str, x: list[float], level: Level, colour: str) -> Iterator[Figure]:
    yield line(name, x, level.mean, colour, yaxis="y2")
    yield most(f"{name}, most", x, level.high, colour, yaxis="y2")


def _load_words(usage: PoolUsage, report: Report) -> str:
    waiting = max((value for value in report.series.pools.waiting.high if value), default=0)
    preempted = report.summary.preemptions.count
    return (
        f"Usage was {percent(usage.mean_pct)} on average and {percent(usage.peak_pct)} at its "
        f"peak, at {seconds(usage.peak.timestamp_sec)}. At most {waiting:,.0f} requests waited, "
        f"and {preempted:,} were preempted. Lines are means over "
        f"{seconds(report.series.bins.width_sec)}; shaded: from the lowest to the highest usage "
        "in that time; dotted: the most requests in it."
    )


def _bands(usage: PoolUsage) -> Table | None:
    if usage.bands is None:
        return None
    shares = map(share, astuple(usage.bands))
    return Table(("Usage", "share of the time"), list(zip(BANDS.values(), shares, strict=True)))
