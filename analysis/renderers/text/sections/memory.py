# SPDX-License-Identifier: Apache-2.0
"""Where the GPUs' memory went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.gpu.memory import GpuUse, Memory, Spare, StartUp
from analysis.renderers.text.layout import Line, note, row, table
from analysis.wording.formats import byte_size, percent, seconds, share

SHOWN = 8
"""Workers and GPUs that are named."""


def lines(memory: Memory) -> Iterator[Line]:
    """The section; empty where nothing is known."""
    if memory.start_up is not None:
        yield from _start_up(memory.start_up, several=len(memory.workers) > 1)
    yield from _spare(memory.spare)
    yield from _gpus(memory.gpus)
    if memory.problem is not None:
        what = "Not all was sampled" if memory.gpus else "Not sampled"
        yield from note(f"{what}: {memory.problem}.")


def _start_up(found: StartUp, *, several: bool) -> Iterator[Line]:
    if several and found.worker is not None:
        yield from note(f"Worker {found.worker} has the least for the KV cache, and decides:")
    yield from _amount("Asked for", found.requested_bytes, _of_total(found))
    yield from _amount("- weights", found.weights_bytes)
    yield from _amount("- activations", found.activation_bytes, "at the peak of a trial run")
    yield from _amount("- not by torch", found.non_torch_bytes)
    if found.graphs_estimate_applied:
        yield from _amount("- graphs, estimated", found.graphs_estimated_bytes)
    yield from _amount("= for the KV cache", found.kv_bytes)
    if found.unexplained_bytes:
        off = "more" if found.unexplained_bytes < 0 else "less"
        size = byte_size(abs(found.unexplained_bytes))
        yield from row("Does not add up", f"{size} {off}", "than the lines above come to")
    blocks = "" if found.blocks is None else f"in {found.blocks:,} blocks"
    yield from _amount("KV cache made of", found.kv_allocated_bytes, blocks)
    if found.graphs_estimated_bytes is not None and not found.graphs_estimate_applied:
        yield from _amount(
            "Graphs, estimated", found.graphs_estimated_bytes, "not taken off the KV cache"
        )
    yield from _amount("Graphs, measured", found.graphs_bytes, "after all of this was allocated")


def _amount(label: str, size: int | None, more: str = "") -> Iterator[Line]:
    if size is not None:
        yield from row(label, f"{byte_size(size):>10}", more)


def _of_total(found: StartUp) -> str:
    if not found.total_bytes or found.requested_bytes is None:
        return ""
    part = share(found.requested_bytes / found.total_bytes)
    return f"{part} of {byte_size(found.total_bytes)}"


def _spare(spare: Sequence[Spare]) -> Iterator[Line]:
    if not spare:
        return
    others = ", ".join(
        f"worker {one.worker} {byte_size(one.more_bytes)}"
        + ("" if one.blocks is None else f" ({one.blocks:,} blocks)")
        for one in spare[:SHOWN]
    )
    more = f" and {len(spare) - SHOWN} more workers" if len(spare) > SHOWN else ""
    yield from row("Unused elsewhere", f"{others}{more}")


def _gpus(gpus: Sequence[GpuUse]) -> Iterator[Line]:
    if not gpus:
        return
    fullest = sorted(gpus, key=lambda gpu: (gpu.free_bytes, gpu.gpu))[:SHOWN]
    rows = [
        (
            f"GPU {gpu.gpu}",
            byte_size(gpu.peak_used_bytes),
            seconds(gpu.peak_sec),
            byte_size(gpu.free_bytes),
            byte_size(round(gpu.mean_used_bytes)),
            percent(gpu.utilization_mean_pct),
        )
        for gpu in sorted(fullest, key=lambda gpu: gpu.gpu)
    ]
    yield from table(("", "peak used", "at", "free then", "mean used", "busy"), rows)
    if len(gpus) > SHOWN:
        yield from note(f"{len(gpus) - SHOWN} more GPUs had more free.")
