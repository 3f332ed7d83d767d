# SPDX-License-Identifier: Apache-2.0
"""Where the GPUs' memory went at start-up."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.gpu.graph_ledger import Estimate
from analysis.gpu.memory import Memory, StartUp
from analysis.renderers.html.chart import Bars, Chart, Segment, Table
from analysis.renderers.html.report import Report
from analysis.wording.formats import byte_size, counted, number

WORKERS = 16
"""Workers with a bar: those with the least for the KV cache."""


def charts(report: Report) -> Iterator[Chart]:
    """None where nothing is known of it."""
    memory, ledger = report.summary.memory, report.summary.graph_ledger
    if memory.workers:
        yield _start_up(memory)
    if ledger is not None and ledger.estimate is not None:
        yield from _graphs(ledger.estimate)


def _start_up(memory: Memory) -> Chart:
    least = sorted(memory.workers, key=lambda found: (found.kv_bytes or 0, found.worker or 0))
    workers = sorted(least[:WORKERS], key=lambda found: found.worker or 0)
    requested = {found.requested_bytes for found in workers}
    mark = next(iter(requested)) if len(requested) == 1 else None
    taken = (
        ("weights", [found.weights_bytes for found in workers], "held"),
        ("activations at the peak", [found.activation_bytes for found in workers], "regret"),
        ("not by torch", [found.non_torch_bytes for found in workers], "purple"),
        ("CUDA graphs", [_graph_bytes(found) for found in workers], "green"),
        ("KV cache", [_kv_bytes(found) for found in workers], "cached"),
        ("unused", [_unused(found) for found in workers], "free"),
    )
    segments = [
        Segment(name, [size or 0 for size in sizes], colour)
        for name, sizes, colour in taken
        if any(sizes)
    ]
    bars = Bars(
        [_worker(found) for found in workers],
        [f"{byte_size(_kv_bytes(found))} for the KV cache" for found in workers],
        segments,
        "memory of the GPU",
        mark=mark,
    )
    return Chart(
        "start-up",
        "Where did the memory go at start-up?",
        "The KV cache gets what is left of the memory asked for. Unused memory beyond the upright "
        "line was never asked for; before the line it serves nobody.",
        _start_up_words(memory, mark),
        bars if segments else None,
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
            f"{byte_size(found.requested_bytes)} of {byte_size(found.total_bytes)} were asked "
            f"for{line}."
        )
    if found.kv_bytes is not None:
        blocks = "" if found.blocks is None else f" in {counted(found.blocks, 'block')}"
        words.append(
            f"{byte_size(found.kv_bytes)} were left for the KV cache, which takes "
            f"{byte_size(_kv_bytes(found))}{blocks}."
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
    return " ".join(words) or "The workers did not report all of it."


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
    off = found.unexplained_bytes
    sign = "-" if off is not None and off < 0 else ""
    return (
        _worker(found),
        *map(byte_size, sizes),
        number(found.blocks),
        "n/a" if off is None else f"{sign}{byte_size(abs(off))}",
    )


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
            [Segment("memory", [size for _, size in figures], "green")],
            "memory of the GPU",
        ),
    )
