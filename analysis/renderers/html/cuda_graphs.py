# SPDX-License-Identifier: Apache-2.0
"""How much ran in CUDA graphs, what was padding, and which sizes batches have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from analysis.gpu.capture_sizes import CaptureSizes, Fit
from analysis.gpu.cuda_graphs import CudaGraphs, ModeUse, Setup
from analysis.gpu.executions import NONE
from analysis.renderers.html.chart import (
    Bars,
    Chart,
    Figure,
    Part,
    Table,
    axis,
    count_axis,
    line,
    panels,
    safe,
    stacked,
    time_axis,
    times,
)
from analysis.renderers.html.report import Report
from analysis.renderers.text.cuda_graphs import WHY
from analysis.series.executions import BatchSize
from analysis.wording.formats import abridged, counted, seconds, share, stretches

_COLOURS = {"FULL": "held", "PIECEWISE": "cached", NONE: "free"}
_FIT_COLOURS = {"today's": "text", "least padding": "green", "fewest": "purple"}


def charts(report: Report) -> Iterator[Chart]:
    """One line alone where there is nothing to tell."""
    graphs = report.summary.cuda_graphs
    if graphs.absent is not None:
        yield Chart("executions", "How much ran in CUDA graphs?", "", graphs.absent)
        return
    yield _executions(report)
    if graphs.eager:
        yield _eager(graphs)
    yield _batch_sizes(report)


def _executions(report: Report) -> Chart:
    graphs, ran = report.summary.cuda_graphs, report.series.executions
    x = times(report.series.bins.middles)
    figure: Figure = {
        "data": [
            stacked(_name(mode), x, rate, _COLOURS.get(mode, "green"))
            for mode, rate in ran.rate.items()
        ],
        "layout": {
            "xaxis": time_axis(report.series.bins),
            "yaxis": count_axis("executions a second"),
            "hovermode": "x unified",
        },
    }
    padded = ""
    if graphs.in_graphs:
        top, bottom = panels(2)
        shares = [None if part is None else 100 * part for part in ran.padding]
        dots = {"mode": "lines+markers", "marker": {"size": 4}}
        figure["data"].append(line("padding", x, shares, "regret", yaxis="y2", **dots))
        figure["layout"] |= {"yaxis2": count_axis("padding, %", domain=bottom)}
        figure["layout"]["yaxis"] |= {"domain": top}
        figure["layout"]["xaxis"] |= {"anchor": "y2"}
        padded = (
            f" {share(graphs.padding.share)} of what graphs computed was padding: "
            f"{graphs.padding.tokens:,} tokens."
        )
    return Chart(
        "executions",
        "How much ran in CUDA graphs?",
        "Small batches that run eagerly wait for the host to launch every kernel; batches with "
        "long prompts lose little by it. Padding is work that is thrown away.",
        f"{share(graphs.execution_share)} of {counted(graphs.executions, 'execution')} ran in a "
        f"graph, with {share(graphs.token_share)} of the tokens; the guide wants over 90 % of "
        f"executions.{padded}{_setup(graphs.setup)}{_workers(graphs)} The chart shows means over "
        f"{seconds(report.series.bins.width_sec)}.",
        figure,
        Table(
            ("Mode", "executions", "of all", "tokens", "of all", "padding", "launch", "on the GPU"),
            [_mode(use) for use in graphs.by_mode],
        ),
        over_time=True,
        height=460 if graphs.in_graphs else 320,
    )


def _name(mode: str) -> str:
    return "eager" if mode == NONE else safe(abridged(mode))


def _setup(setup: Setup) -> str:
    """What was asked for, and what came of it."""
    if setup.asked is None:
        return ""
    if setup.resolved is None or setup.resolved == setup.asked:
        return f" The mode is {abridged(setup.asked)}, as asked for."
    backends = abridged(", ".join(setup.attention_backends))
    by = f" by the attention backend ({backends})" if backends else ""
    return (
        f" {abridged(setup.asked)} was asked for, and resolved to {abridged(setup.resolved)}{by}."
    )


def _workers(graphs: CudaGraphs) -> str:
    workers = len(graphs.by_worker)
    return f" All {workers:,} workers together." if workers > 1 else ""


def _mode(use: ModeUse) -> tuple[str, ...]:
    return (
        "eager" if use.mode == NONE else abridged(use.mode),
        f"{use.executions:,}",
        share(use.execution_share),
        f"{use.tokens:,}",
        share(use.token_share),
        "n/a" if use.mode == NONE else f"{use.padding:,}",
        *("n/a" if us is None else seconds(us / 1e6) for us in (use.launch_us, use.gpu_us)),
    )


def _eager(graphs: CudaGraphs) -> Chart:
    labels = [WHY[part.reason] for part in graphs.eager]
    executions = [part.executions for part in graphs.eager]
    most = [
        ", ".join(f"{batch.tokens:,} ({batch.executions:,} times)" for batch in part.most)
        for part in graphs.eager
    ]
    return Chart(
        "eager",
        "Why did the rest run eagerly?",
        "Batches a little larger than the largest graph are mended by another capture size; "
        "batches with long prompts need no graph.",
        f"{counted(graphs.executions - graphs.in_graphs, 'execution')} ran without a graph. The "
        f"commonest batches of the first bar, in tokens: {most[0]}.",
        Bars(
            labels,
            [f"{part.executions:,} ({share(part.execution_share)})" for part in graphs.eager],
            [Part("executions", executions, "regret")],
            "executions",
        ),
        Table(
            ("Reason", "executions", "tokens", "smallest", "median", "largest", "commonest"),
            [
                (
                    label,
                    *(
                        f"{figure:,}"
                        for figure in (
                            part.executions,
                            part.tokens,
                            part.smallest_tokens,
                            part.p50_tokens,
                            part.largest_tokens,
                        )
                    ),
                    commonest,
                )
                for label, part, commonest in zip(labels, graphs.eager, most, strict=True)
            ],
        ),
    )


def _batch_sizes(report: Report) -> Chart:
    graphs, sizes = report.summary.cuda_graphs, report.summary.capture_sizes
    batches = report.series.executions.batches
    heading = "Which sizes do batches have, and which graphs are there for them?"
    if not batches:
        return Chart("batch-sizes", heading, "", "No batch had a token.")
    fits = [] if sizes is None else _fits(sizes)
    return Chart(
        "batch-sizes",
        heading,
        "A batch is padded to the next capture size on its right: tall bars far left of one are "
        "what padding costs, and bars right of the last one run eagerly.",
        _fit_words(fits, graphs),
        _sizes_figure(list(report.series.executions.rate), batches, fits),
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
            [(name.capitalize(), *_fit(fit)) for name, fit in fits],
        )
        if fits
        else None,
        height=560 if fits else 320,
    )


def _fits(sizes: CaptureSizes) -> list[tuple[str, Fit]]:
    """Today's sizes, and those that would do better."""
    better, fewest = sizes.least_padding, sizes.fewest
    fits = [("today's", sizes.today)]
    if better is not None and better.sizes != sizes.today.sizes:
        fits.append(("least padding", better))
    if fewest is not None and len(fewest.sizes) < len(sizes.today.sizes):
        fits.append(("fewest", fewest))
    return fits


def _fit(fit: Fit) -> tuple[str, ...]:
    return (
        f"{len(fit.sizes):,}",
        f"{fit.executions:,}",
        share(fit.execution_share),
        f"{fit.tokens:,}",
        f"{fit.padding:,}",
        share(fit.padding_share),
        stretches(fit.sizes),
    )


def _fit_words(fits: Sequence[tuple[str, Fit]], graphs: CudaGraphs) -> str:
    if not fits:
        return f"{counted(graphs.executions, 'execution')}. {_BARS}"
    words = [
        f"{len(fit.sizes):,} sizes {_which(name)}, and {share(fit.execution_share)} of these "
        f"batches {'run' if fit is fits[0][1] else 'would run'} in a graph with "
        f"{share(fit.padding_share)} padding."
        for name, fit in fits
    ]
    if graphs.padding.worst:
        costliest = "; ".join(
            f"{batch.tokens:,} tokens to {batch.size:,}, {batch.executions:,} times"
            for batch in graphs.padding.worst
        )
        words.append(f"The costliest padding: {costliest}.")
    if len(fits) > 1:
        words.append("Suggested sizes are made for this session; other loads would pad more.")
    return " ".join([*words, _BARS])


_BARS = "Above 64 tokens a bar counts several sizes."


def _which(name: str) -> str:
    return {
        "today's": "are captured today",
        "least padding": "would pad least",
        "fewest": "would pad no more than today's",
    }[name]


def _sizes_figure(
    modes: Sequence[str], batches: Sequence[BatchSize], fits: Sequence[tuple[str, Fit]]
) -> Figure:
    """Executions on top, then the capture sizes, then padding, all by the batch's size."""
    largest = max([*(batch.to_tokens for batch in batches), *(fit.sizes[-1] for _, fit in fits)])
    ticks = [2**power for power in range(largest.bit_length() + 1)]
    bars = [
        _bars(_name(mode), batches, [batch.by_mode.get(mode, 0) for batch in batches])
        | {"marker": {"color": f"var(--{_COLOURS.get(mode, 'green')})", "line": {"width": 0}}}
        for mode in modes
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
    if not fits:
        return {"data": bars, "layout": layout}
    padding = _bars("padding", batches, [batch.padding for batch in batches], yaxis="y3")
    padding["marker"] = {"color": "var(--regret)", "line": {"width": 0}}
    marks = [_marks(name, fit, len(fits) - row) for row, (name, fit) in enumerate(fits)]
    layout["xaxis"] |= {"anchor": "y3", "showgrid": False}
    layout["yaxis"] |= {"domain": [0.56, 1]}
    layout["yaxis2"] = axis(
        "sizes",
        domain=[0.38, 0.51],
        range=[0.5, len(fits) + 0.5],
        tickvals=[len(fits) - row for row in range(len(fits))],
        ticktext=[name for name, _ in fits],
        showgrid=False,
        fixedrange=True,
    )
    layout["yaxis3"] = count_axis("padding tokens", domain=[0, 0.33])
    layout["shapes"] = [_through(size) for size in fits[0][1].sizes]
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
            "color": f"var(--{_FIT_COLOURS[name]})",
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
