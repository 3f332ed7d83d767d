# SPDX-License-Identifier: Apache-2.0
"""Where the GPUs' memory went: at start-up, and over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.gpu.graph_ledger import Estimate
from analysis.gpu.memory import GpuUse, Memory, StartUp
from analysis.renderers.html.chart import (
    Bars,
    Chart,
    Figure,
    Part,
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
from analysis.wording.formats import abridged, byte_size, counted, percent, seconds

WORKERS = 16
"""Workers with a bar: those with the least for the KV cache."""
GPUS = 8
"""GPUs with a line: those with the least free."""

_GIB = 2**30
_COLOURS = ("held", "cached", "green")
_DASHES = ("solid", "dash", "dot")


def charts(report: Report) -> Iterator[Chart]:
    """None where nothing is known of a GPU."""
    memory, ledger = report.summary.memory, report.summary.graph_ledger
    if memory.workers:
        yield _start_up(memory)
    if ledger is not None and ledger.estimate is not None:
        yield from _graphs(ledger.estimate)
    if memory.gpus:
        yield _over_time(report)
    elif memory.problem is not None:
        yield Chart(
            "used-memory",
            "How full and how busy were the GPUs?",
            "",
            f"Not sampled: {memory.problem}.",
        )


def _start_up(memory: Memory) -> Chart:
    least = sorted(memory.workers, key=lambda found: (found.kv_bytes or 0, found.worker or 0))
    workers = sorted(least[:WORKERS], key=lambda found: found.worker or 0)
    requested = {found.requested_bytes for found in workers}
    mark = next(iter(requested)) if len(requested) == 1 else None
    told = (
        ("weights", [found.weights_bytes for found in workers], "held"),
        ("activations at the peak", [found.activation_bytes for found in workers], "regret"),
        ("not by torch", [found.non_torch_bytes for found in workers], "purple"),
        ("CUDA graphs", [_graph_bytes(found) for found in workers], "green"),
        ("KV cache", [_kv_bytes(found) for found in workers], "cached"),
        ("unused", [_unused(found) for found in workers], "free"),
    )
    parts = [
        Part(name, [size or 0 for size in sizes], colour)
        for name, sizes, colour in told
        if any(sizes)
    ]
    bars = Bars(
        [_worker(found) for found in workers],
        [f"{_size(_kv_bytes(found))} for the KV cache" for found in workers],
        parts,
        "memory of the GPU",
        mark=mark,
    )
    return Chart(
        "start-up",
        "Where did the memory go at start-up?",
        "The KV cache gets what is left of the memory asked for; what is unused beyond the upright "
        "line was never asked for, and before it nobody has it.",
        _start_up_words(memory, mark),
        bars if parts else None,
        Table(
            (
                "Worker",
                "total",
                "asked for",
                "weights",
                "activations",
                "not by torch",
                "graphs, estimated",
                "graphs, measured",
                "for the KV cache",
                "KV cache",
                "blocks",
                "does not add up",
            ),
            [_row(found) for found in workers],
        ),
    )


def _worker(found: StartUp) -> str:
    return "the worker" if found.worker is None else f"worker {found.worker}"


def _graph_bytes(found: StartUp) -> int | None:
    """What graphs took; where that was not measured, what was reserved for them."""
    if found.graphs_bytes is not None or not found.graphs_estimate_applied:
        return found.graphs_bytes
    return found.graphs_estimated_bytes


def _kv_bytes(found: StartUp) -> int | None:
    return found.kv_bytes if found.kv_allocated_bytes is None else found.kv_allocated_bytes


def _unused(found: StartUp) -> int | None:
    """What nothing is known to have taken; None where not all is known."""
    taken = (found.weights_bytes, found.activation_bytes, found.non_torch_bytes, _kv_bytes(found))
    if found.total_bytes is None or None in taken:
        return None
    sizes = (*taken, _graph_bytes(found))
    return max(0, found.total_bytes - sum(size or 0 for size in sizes))


def _start_up_words(memory: Memory, mark: int | None) -> str:
    found = memory.start_up
    words = []
    if found is None:
        return ""
    if found.requested_bytes is not None:
        line = "" if mark is None else ", the upright line"
        words.append(
            f"{byte_size(found.requested_bytes)} of {_size(found.total_bytes)} were asked "
            f"for{line}."
        )
    if found.kv_bytes is not None:
        blocks = "" if found.blocks is None else f" in {counted(found.blocks, 'block')}"
        words.append(
            f"{byte_size(found.kv_bytes)} were left for the KV cache, which takes "
            f"{_size(_kv_bytes(found))}{blocks}."
        )
    if found.unexplained_bytes:
        size = byte_size(abs(found.unexplained_bytes))
        words.append(
            f"{size} of what was asked for are not accounted for."
            if found.unexplained_bytes > 0
            else f"The parts come to {size} more than was asked for."
        )
    if len(memory.workers) > 1 and found.kv_bytes is not None:
        words.append(f"{_worker(found).capitalize()} has the least for it, and decides.")
    more = len(memory.workers) - WORKERS
    if more > 0:
        words.append(f"{counted(more, 'more worker')} had more.")
    return " ".join(words) or "The workers did not tell all of it."


def _row(found: StartUp) -> tuple[str, ...]:
    sizes = (
        found.total_bytes,
        found.requested_bytes,
        found.weights_bytes,
        found.activation_bytes,
        found.non_torch_bytes,
        found.graphs_estimated_bytes,
        found.graphs_bytes,
        found.kv_bytes,
        found.kv_allocated_bytes,
    )
    blocks = "n/a" if found.blocks is None else f"{found.blocks:,}"
    off = found.unexplained_bytes
    sign = "-" if off is not None and off < 0 else ""
    return (
        _worker(found),
        *map(_size, sizes),
        blocks,
        "n/a" if off is None else f"{sign}{byte_size(abs(off))}",
    )


def _size(size: int | None) -> str:
    return "n/a" if size is None else byte_size(size)


def _graphs(estimate: Estimate) -> Iterator[Chart]:
    """What vLLM thought graphs would take beside what they took."""
    figures = [
        (label, size)
        for label, size in (
            ("reserved, by vLLM's estimate", estimate.estimated_bytes),
            ("taken, as vLLM found", estimate.measured_bytes),
            ("sum of the single captures", estimate.captured_bytes),
        )
        if size is not None
    ]
    if estimate.ratio is None:
        return
    applied = {
        True: "It was taken off the KV cache.",
        False: "It was not taken off the KV cache.",
        None: "",
    }[estimate.applied]
    if estimate.blocks:
        few = "too few" if estimate.blocks > 0 else "more than there was memory for"
        applied = f"It was taken off the KV cache: {abs(estimate.blocks):,} blocks {few}."
    yield Chart(
        "graph-memory",
        "Did vLLM reserve the right amount for CUDA graphs?",
        "An estimate far too high takes blocks from the KV cache; one far too low can end in a "
        "failure when memory runs out.",
        f"The estimate was {estimate.ratio:.2f} times what graphs took. {applied}".strip(),
        Bars(
            [label for label, _ in figures],
            [byte_size(size) for _, size in figures],
            [Part("memory", [size for _, size in figures], "green")],
            "memory of the GPU",
        ),
    )


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
        "How full and how busy were the GPUs?",
        "Memory that grows after start-up is taken by others than the KV cache, whose room is "
        "taken at once; a GPU that is not busy waits for the host, or for requests.",
        f"The least that was free is {byte_size(min(gpu.free_bytes for gpu in memory.gpus))}. "
        f"Memory is the most of any sample in {seconds(bins.width_sec)}, and busy the mean share "
        "of the time in which any kernel ran."
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
                _size(gpu.total_bytes),
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
