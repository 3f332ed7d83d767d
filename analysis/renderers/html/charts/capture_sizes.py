# SPDX-License-Identifier: Apache-2.0
"""Which sizes batches have, and which capture sizes would serve them better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from analysis.gpu.capture_sizes import Fit
from analysis.gpu.cuda_graphs import CudaGraphs
from analysis.renderers.html import modes
from analysis.renderers.html.chart import Chart, Figure, Table, axis, count_axis
from analysis.renderers.html.report import Report
from analysis.series.executions import BatchSize
from analysis.wording.cuda_graphs import FEWEST, LEAST_PADDING, TODAY, fits
from analysis.wording.formats import counted, ranges, share

_COLOURS = {TODAY: "text", LEAST_PADDING: "green", FEWEST: "purple"}


def charts(report: Report) -> Iterator[Chart]:
    """One chart; none where the session has no executions."""
    if report.summary.cuda_graphs.absent is None:
        yield _batch_sizes(report)


def _batch_sizes(report: Report) -> Chart:
    graphs, sizes = report.summary.cuda_graphs, report.summary.capture_sizes
    batches = report.series.executions.batches
    heading = "Which sizes do batches have, and which graphs are there for them?"
    if not batches:
        return Chart("batch-sizes", heading, "", "No batch had a token.")
    found = [] if sizes is None else fits(sizes)
    return Chart(
        "batch-sizes",
        heading,
        "A batch is padded to the next capture size on its right: tall bars far left of one are "
        "what padding costs, and bars right of the last one run eagerly.",
        _words(found, graphs),
        _sizes_figure(list(report.series.executions.rate), batches, found),
        Table(
            (
                "Capture sizes",
                "how many",
                "executions",
                "of all",
                "tokens",
                "padding",
                "of computed",
                "sizes",
            ),
            [(name.capitalize(), *_fit(fit)) for name, fit in found],
        )
        if found
        else None,
        height=560 if found else 320,
    )


def _fit(fit: Fit) -> tuple[str, ...]:
    return (
        f"{len(fit.sizes):,}",
        f"{fit.executions:,}",
        share(fit.execution_share),
        f"{fit.tokens:,}",
        f"{fit.padding:,}",
        share(fit.padding_share),
        ranges(fit.sizes),
    )


def _words(found: Sequence[tuple[str, Fit]], graphs: CudaGraphs) -> str:
    if not found:
        return f"{counted(graphs.executions, 'execution')}. {_BARS}"
    words = [
        f"{len(fit.sizes):,} sizes {_which(name)}, and {share(fit.execution_share)} of these "
        f"batches {'run' if fit is found[0][1] else 'would run'} in a graph with "
        f"{share(fit.padding_share)} padding."
        for name, fit in found
    ]
    if graphs.padding.worst:
        costliest = "; ".join(
            f"{batch.tokens:,} tokens to {batch.size:,}, {batch.executions:,} times"
            for batch in graphs.padding.worst
        )
        words.append(f"The costliest padding: {costliest}.")
    if len(found) > 1:
        words.append("Suggested sizes are made for this session; other loads would pad more.")
    return " ".join([*words, _BARS])


_BARS = "Above 64 tokens a bar counts several sizes."


def _which(name: str) -> str:
    return {
        TODAY: "are captured today",
        LEAST_PADDING: "would pad least",
        FEWEST: "would pad no more than today's",
    }[name]


def _sizes_figure(
    names: Sequence[str], batches: Sequence[BatchSize], found: Sequence[tuple[str, Fit]]
) -> Figure:
    """Executions on top, then the capture sizes, then padding, all by the batch's size."""
    largest = max([*(batch.to_tokens for batch in batches), *(fit.sizes[-1] for _, fit in found)])
    ticks = [2**power for power in range(largest.bit_length() + 1)]
    bars = [
        _bars(modes.name(name), batches, [batch.by_mode.get(name, 0) for batch in batches])
        | {"marker": {"color": f"var(--{modes.colour(name)})", "line": {"width": 0}}}
        for name in names
    ]
    layout: Figure = {
        "xaxis": axis(
            "tokens of a batch, without padding (logarithmic)",
            type="log",
            tickvals=ticks,
            ticktext=[f"{tick:,}" for tick in ticks],
            range=[math.log10(0.5), math.log10(1.1 * largest + 1)],
        ),
        "yaxis": count_axis("executions"),
        "barmode": "stack",
    }
    if not found:
        return {"data": bars, "layout": layout}
    padding = _bars("padding", batches, [batch.padding for batch in batches], yaxis="y3")
    padding["marker"] = {"color": "var(--regret)", "line": {"width": 0}}
    marks = [_marks(name, fit, len(found) - row) for row, (name, fit) in enumerate(found)]
    layout["xaxis"] |= {"anchor": "y3", "showgrid": False}
    layout["yaxis"] |= {"domain": [0.56, 1]}
    layout["yaxis2"] = axis(
        "sizes",
        domain=[0.38, 0.51],
        range=[0.5, len(found) + 0.5],
        tickvals=[len(found) - row for row in range(len(found))],
        ticktext=[name for name, _ in found],
        showgrid=False,
        fixedrange=True,
    )
    layout["yaxis3"] = count_axis("padding tokens", domain=[0, 0.33])
    layout["shapes"] = [_through(size) for size in found[0][1].sizes]
    return {"data": [*bars, *marks, padding], "layout": layout}


def _bars(name: str, batches: Sequence[BatchSize], values: Sequence[int], **more: Any) -> Figure:
    """A bar for each size, or as wide as the sizes that it counts."""
    spans = [(batch.from_tokens, batch.to_tokens) for batch in batches]
    return {
        "type": "bar",
        "name": name,
        "x": [(begin + end) / 2 for begin, end in spans],
        "width": [end - begin + 1 for begin, end in spans],
        "y": values,
        "text": [_span(begin, end) for begin, end in spans],
        "textposition": "none",
        "hovertemplate": f"%{{text}}: %{{y:,}} {name}<extra></extra>",
        **more,
    }


def _span(begin: int, end: int) -> str:
    return f"{counted(end, 'token')}" if begin == end else f"{begin:,} to {end:,} tokens"


def _marks(name: str, fit: Fit, height: int) -> Figure:
    """A stroke at each capture size."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": fit.sizes,
        "y": [height] * len(fit.sizes),
        "yaxis": "y2",
        "showlegend": False,
        "hovertemplate": f"{name}: %{{x:,}} tokens<extra></extra>",
        "marker": {
            "symbol": "line-ns-open",
            "size": 12,
            "color": f"var(--{_COLOURS[name]})",
            "line": {"width": 2},
        },
    }


def _through(size: int) -> Figure:
    """A faint line through all panels at a size that is captured today."""
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": size,
        "x1": size,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"color": "var(--rule)", "width": 1},
    }
