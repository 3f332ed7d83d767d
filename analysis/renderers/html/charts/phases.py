# SPDX-License-Identifier: Apache-2.0
"""What steps computed, prompts or answers, and how long that took on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from analysis.gpu.gpu_time import GpuTime
from analysis.renderers.html.chart import Chart, Figure, Table, count_axis, line, time_axis, times
from analysis.renderers.html.report import Report
from analysis.wording.formats import counted, seconds, share
from analysis.wording.phases import PHASES

_COLOURS = {"prefill": "cached", "mixed": "regret", "decode": "held"}


def charts(report: Report) -> Iterator[Chart]:
    """None where all steps were of one phase and none was timed."""
    if len(report.summary.scheduling.by_phase) > 1:
        yield _tokens(report)
    if report.series.phases.gpu_ms:
        yield _on_the_gpu(report)


def _tokens(report: Report) -> Chart:
    phases = report.summary.scheduling.by_phase
    total = sum(each.prefill_tokens + each.decode_tokens for each in phases)
    parts = ", ".join(
        f"{PHASES[each.phase].lower()} {each.steps:,} steps with {each.tokens.mean:,.1f} tokens"
        for each in phases
    )
    rows = [
        (
            PHASES[each.phase],
            f"{each.steps:,}",
            f"{each.prefill_tokens:,}",
            f"{each.decode_tokens:,}",
            share((each.prefill_tokens + each.decode_tokens) / total if total else 0.0),
            f"{each.tokens.mean:,.1f}",
            f"{each.tokens.p95:,.0f}",
            f"{each.tokens.max:,.0f}",
        )
        for each in phases
    ]
    head = ("Phase", "steps", "of prompts", "of answers", "of all", "a step", "95th pct.", "max")
    return Chart(
        "step-phases",
        "What did steps compute, prompts or answers?",
        "In a mixed step answers wait for the prompts that share it; with chunked prefill most "
        "prompts are in mixed steps.",
        f"On average: {parts}. Lines are means over {seconds(report.series.bins.width_sec)}.",
        _figure(report, report.series.phases.tokens, "tokens a step"),
        Table(head, rows),
        over_time=True,
    )


def _on_the_gpu(report: Report) -> Chart:
    measured = report.summary.gpu_time
    figure = _figure(report, report.series.phases.gpu_ms, "ms a step on the GPU")
    encoder = report.series.phases.encoder_ms
    if encoder:
        x = times(report.series.bins.middles)
        figure["data"].append(line("encoder", x, encoder, "green", **_DOTS))
    return Chart(
        "gpu-time",
        "How long did a step take on the GPU?",
        "What a mixed step takes more than one of answers alone is what answers wait for prompts.",
        _words(measured)
        + f" Lines are means over {seconds(report.series.bins.width_sec)}, by CUDA events.",
        figure,
        Table(
            ("Phase", "steps", "GPU time", "of all", "median", "95th pct.", "99th pct.", "max"),
            [
                (
                    PHASES[each.phase],
                    f"{each.steps:,}",
                    seconds(each.gpu_sec),
                    "n/a" if each.share is None else share(each.share),
                    seconds(each.step.p50_sec),
                    seconds(each.step.p95_sec),
                    seconds(each.step.p99_sec),
                    seconds(each.step.max_sec),
                )
                for each in measured.by_phase
            ],
        ),
        over_time=True,
    )


def _words(measured: GpuTime) -> str:
    medians = ", ".join(
        f"{PHASES[each.phase].lower()} {seconds(each.step.p50_sec)}"
        for each in measured.by_phase
        if each.step.count
    )
    words = (
        f"{counted(measured.timed, 'step')} of {counted(measured.workers, 'worker')} took "
        f"{seconds(measured.gpu_sec)} on the GPU. Median of a step: {medians}."
    )
    if measured.encoder is not None and measured.encoder.step.count:
        words += f" The encoder took {seconds(measured.encoder.gpu_sec)} of that."
    return words


_DOTS = {"mode": "lines+markers", "marker": {"size": 4}}
"""A bin with a step between two without any has no line, but a dot."""


def _figure(report: Report, values: Mapping[str, tuple[float | None, ...]], unit: str) -> Figure:
    x = times(report.series.bins.middles)
    return {
        "data": [
            line(PHASES[phase].lower(), x, of_phase, _COLOURS[phase], **_DOTS)
            for phase, of_phase in values.items()
        ],
        "layout": {
            "xaxis": time_axis(report.series.bins),
            "yaxis": count_axis(unit),
            "hovermode": "x unified",
        },
    }
