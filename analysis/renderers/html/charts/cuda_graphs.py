# SPDX-License-Identifier: Apache-2.0
"""How much ran in CUDA graphs, what was padding, and why the rest ran eagerly."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.gpu.cuda_graphs import CudaGraphs, ModeUse, Setup
from analysis.gpu.executions import NONE
from analysis.renderers.html import modes
from analysis.renderers.html.chart import (
    Bars,
    Chart,
    Figure,
    Segment,
    Table,
    count_axis,
    line,
    panels,
    stacked,
    time_axis,
    times,
)
from analysis.renderers.html.report import Report
from analysis.wording.cuda_graphs import WHY_EAGER
from analysis.wording.formats import counted, seconds, share
from analysis.wording.printable import abridged


def charts(report: Report) -> Iterator[Chart]:
    """One line alone where nothing is known."""
    graphs = report.summary.cuda_graphs
    if graphs.absent is not None:
        yield Chart("executions", "How much ran in CUDA graphs?", "", graphs.absent)
        return
    yield _executions(report)
    if graphs.eager:
        yield _eager(graphs)


def _executions(report: Report) -> Chart:
    graphs, ran = report.summary.cuda_graphs, report.series.executions
    x = times(report.series.bins.middles)
    figure: Figure = {
        "data": [
            stacked(modes.name(mode), x, rate, modes.colour(mode))
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
        f"graph, with {share(graphs.token_share)} of the tokens; over 90 % of executions is "
        f"good.{padded}{_setup(graphs.setup)}{_workers(graphs)} The chart shows means over "
        f"{seconds(report.series.bins.width_sec)}.",
        figure,
        Table(
            ("Mode", "executions", "of all", "tokens", "of all", "padding", "launch", "on the GPU"),
            [_mode(use) for use in graphs.by_mode],
        ),
        over_time=True,
        height=460 if graphs.in_graphs else 320,
    )


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
    labels = [WHY_EAGER[part.reason] for part in graphs.eager]
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
            [Segment("executions", executions, "regret")],
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
