# SPDX-License-Identifier: Apache-2.0
"""How full and how busy the GPUs were over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.gpu.memory import GpuUse
from analysis.renderers.html.chart import (
    Chart,
    Figure,
    Table,
    axis,
    count_axis,
    known,
    line,
    panels,
    safe,
    time_axis,
    times,
)
from analysis.renderers.html.report import Report
from analysis.series.gpu_memory import GpuSeries, Values
from analysis.wording.formats import byte_size, counted, percent, seconds
from analysis.wording.printable import abridged

GPUS = 8
"""GPUs with a line: those with the least free."""

_GIB = 2**30
_COLOURS = ("held", "cached", "green")
_DASHES = ("solid", "dash", "dot")
_HEADING = "How full and how busy were the GPUs?"


def charts(report: Report) -> Iterator[Chart]:
    """One chart; none where nothing was to be sampled."""
    memory = report.summary.memory
    if memory.gpus:
        yield _over_time(report)
    elif memory.problem is not None:
        yield Chart("used-memory", _HEADING, "", f"Not sampled: {memory.problem}.")


def _over_time(report: Report) -> Chart:
    memory, bins = report.summary.memory, report.series.bins
    fullest = sorted(memory.gpus, key=lambda gpu: (gpu.free_bytes, gpu.gpu))[:GPUS]
    drawn = {gpu.gpu: gpu for gpu in sorted(fullest, key=lambda gpu: gpu.gpu)}
    series = [found for found in report.series.gpus if found.gpu in drawn]
    x = times(bins.middles)
    totals = {gpu.total_bytes for gpu in drawn.values()}
    total = next(iter(totals)) if len(totals) == 1 else None
    data = [trace for index, found in enumerate(series) for trace in _lines(x, found, index, drawn)]
    if total is not None:
        data.append(line("total", x, [total / _GIB] * len(x), "regret", line={"width": 1}))
    layout: Figure = {
        "xaxis": time_axis(bins),
        "yaxis": count_axis("memory in use, GiB"),
        "hovermode": "x unified",
    }
    is_busy_known = any(known(found.busy) for found in series)
    if is_busy_known:
        top, bottom = panels(2)
        layout["xaxis"] |= {"anchor": "y2"}
        layout["yaxis"] |= {"domain": top}
        layout["yaxis2"] = axis("busy, % of the time", range=[0, 102], domain=bottom)
    more = len(memory.gpus) - len(drawn)
    problem = "" if memory.problem is None else f" Not all was sampled: {memory.problem}."
    return Chart(
        "used-memory",
        _HEADING,
        "The KV cache takes its memory at once, so memory that grows after start-up goes "
        "elsewhere; a GPU that is not busy waits for the host, or for requests.",
        f"At least {byte_size(min(gpu.free_bytes for gpu in memory.gpus))} was free at any time. "
        f"The chart shows the most memory of any sample in {seconds(bins.width_sec)}; busy is the "
        "mean share of the time in which any kernel ran."
        + (f" {counted(more, 'more GPU')} had more free." if more else "")
        + problem,
        {"data": data, "layout": layout},
        _gpus(list(drawn.values())),
        over_time=True,
        height=460 if is_busy_known else 320,
    )


def _lines(
    x: Sequence[float], found: GpuSeries, index: int, gpus: dict[int, GpuUse]
) -> Iterator[Figure]:
    """A GPU's memory and how busy it was; a moment without a sample is no gap."""
    colour = _COLOURS[index % len(_COLOURS)]
    style = {
        "mode": "lines+markers",
        "marker": {"size": 4},
        "connectgaps": True,
        "legendgroup": f"GPU {found.gpu}",
        "line": {"dash": _DASHES[index // len(_COLOURS) % len(_DASHES)]},
    }
    used: Values = tuple(None if size is None else size / _GIB for size in found.used)
    yield line(safe(_gpu(gpus[found.gpu])), x, used, colour, **style)
    if known(found.busy):
        busy = {"yaxis": "y2", "showlegend": False}
        yield line(f"GPU {found.gpu}", x, found.busy, colour, **style, **busy)


def _gpu(gpu: GpuUse) -> str:
    return f"GPU {gpu.gpu}" + ("" if gpu.name is None else f" ({abridged(gpu.name)})")


def _gpus(gpus: Sequence[GpuUse]) -> Table:
    return Table(
        (
            "GPU",
            "workers",
            "samples",
            "total",
            "peak used",
            "at",
            "free then",
            "mean used",
            "busy, mean",
            "busy, 95th pct.",
        ),
        [
            (
                _gpu(gpu),
                ", ".join(map(str, gpu.workers)),
                f"{gpu.samples:,}",
                byte_size(gpu.total_bytes),
                byte_size(gpu.peak_used_bytes),
                seconds(gpu.peak_sec),
                byte_size(gpu.free_bytes),
                byte_size(gpu.mean_used_bytes),
                percent(gpu.utilization_mean_pct),
                percent(gpu.utilization_p95_pct),
            )
            for gpu in gpus
        ],
    )
