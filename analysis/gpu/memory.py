# SPDX-License-Identifier: Apache-2.0
"""Where did the GPUs' memory go: at start-up, and while the engine ran?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.tables.facts import Facts
from analysis.tables.metadata import flag, listed, number, part, parts, text, whole
from analysis.tables.session import Session

TABLE = "gpu_memory"


@dataclass(frozen=True)
class StartUp:
    """What one worker found at start-up, in bytes; None where it was not recorded.

    vLLM takes ``requested_bytes`` (gpu_memory_utilization of ``total_bytes``). It subtracts
    ``weights_bytes``, ``activation_bytes`` (at the peak of a trial run), ``non_torch_bytes`` and,
    if ``graphs_estimate_applied``, ``graphs_estimated_bytes``. The KV cache gets the rest,
    ``kv_bytes``. ``unexplained_bytes``: the error of that sum, which can be negative; None where a
    part is missing. ``graphs_bytes``: what capturing took, after the KV cache had its memory.
    ``kv_allocated_bytes``: what the KV cache took in the end, in ``blocks``; less than
    ``kv_bytes`` where another worker has less, or where the number of blocks was configured.
    """

    worker: int | None
    total_bytes: int | None
    requested_bytes: int | None
    weights_bytes: int | None
    activation_bytes: int | None
    non_torch_bytes: int | None
    graphs_estimated_bytes: int | None
    graphs_estimate_applied: bool | None
    graphs_bytes: int | None
    kv_bytes: int | None
    kv_allocated_bytes: int | None
    blocks: int | None
    unexplained_bytes: int | None


@dataclass(frozen=True)
class Spare:
    """Memory for the KV cache that a ``worker`` has and cannot use.

    The worker with the least memory decides for all. ``more_bytes``: beyond that worker's.
    ``blocks``: those that would fit into it, None where the size of a block is not known.
    """

    worker: int
    more_bytes: int
    blocks: int | None


@dataclass(frozen=True)
class GpuUse:
    """One GPU as its driver saw it, all processes together, over ``samples``.

    ``gpu``: NVML's index. ``workers``: those that ran on it. ``peak_used_bytes``: the most memory
    in use, at ``peak_sec``, and ``free_bytes`` then. ``mean_used_bytes``: over the samples.
    ``utilization_mean_pct`` and ``utilization_p95_pct``: the share of the time in which any kernel
    ran, in percent, None where not sampled.
    """

    gpu: int
    name: str | None
    total_bytes: int | None
    workers: tuple[int, ...]
    samples: int
    peak_used_bytes: int
    peak_sec: float
    free_bytes: int
    mean_used_bytes: float
    utilization_mean_pct: float | None
    utilization_p95_pct: float | None


@dataclass(frozen=True)
class Memory:
    """``start_up``: of the worker with the least memory for the KV cache, None where no worker
    recorded it. ``workers``: all of them. ``spare``: workers with more, those with most first.
    ``gpus``: by index, sampled every ``interval_sec``. ``problem``: why no GPU was sampled, None
    where one was, or where it is not known.
    """

    start_up: StartUp | None
    workers: tuple[StartUp, ...]
    spare: tuple[Spare, ...]
    gpus: tuple[GpuUse, ...]
    interval_sec: float | None
    problem: str | None


def measure(session: Session, facts: Facts) -> Memory:
    """What the workers found at start-up, and the samples from after the warm-up.

    Raises:
        SessionError: the table cannot be read.

    """
    entry = part(session.metadata, "memory")
    workers = tuple(_start_up(each) for each in parts(entry, "workers")) or (
        (_start_up(entry),) if entry else ()
    )
    known = [worker for worker in workers if worker.kv_bytes is not None]
    least = min(known, key=lambda worker: worker.kv_bytes or 0, default=None)
    sampling = part(session.metadata, "gpu_memory")
    return Memory(
        start_up=least or next(iter(workers), None),
        workers=workers,
        spare=_spare(known, least, facts.bytes_per_block),
        gpus=_gpus(session),
        interval_sec=number(sampling.get("interval_sec")),
        problem=text(sampling.get("problem")),
    )


def _start_up(entry: Mapping[str, Any]) -> StartUp:
    names = (
        *("total_bytes", "requested_bytes", "weights_bytes", "activation_bytes"),
        *("non_torch_bytes", "graphs_estimated_bytes", "graphs_bytes", "kv_bytes"),
        *("kv_allocated_bytes", "blocks"),
    )
    found = {name: whole(entry.get(name)) for name in names}
    applied = flag(entry.get("graphs_estimate_applied"))
    return StartUp(
        worker=whole(entry.get("worker")),
        graphs_estimate_applied=applied,
        unexplained_bytes=_unexplained(found, applied),
        **found,
    )


def _unexplained(found: Mapping[str, int | None], applied: bool | None) -> int | None:
    """The requested memory less all known parts of it."""
    # Releases that estimate no graphs subtract no estimate.
    estimate = found["graphs_estimated_bytes"] or 0 if applied else 0
    taken = [found[f"{name}_bytes"] for name in ("weights", "activation", "non_torch", "kv")]
    requested = found["requested_bytes"]
    if requested is None or None in taken:
        return None
    return requested - estimate - sum(amount or 0 for amount in taken)


def _spare(known: Sequence[StartUp], least: StartUp | None, block: int | None) -> tuple[Spare, ...]:
    if least is None:
        return ()
    more = [
        (worker.worker, (worker.kv_bytes or 0) - (least.kv_bytes or 0))
        for worker in known
        if worker.worker is not None
    ]
    return tuple(
        Spare(rank, size, size // block if block else None)
        for rank, size in sorted(more, key=lambda one: (-one[1], one[0]))
        if size
    )


def _gpus(session: Session) -> tuple[GpuUse, ...]:
    used, utilization = pl.col("used_bytes"), pl.col("utilization_pct")

    def at_peak(column: str) -> pl.Expr:
        """Its value in the first sample with the most memory in use."""
        order = pl.col(column).sort_by("used_bytes", "timestamp_sec", descending=[True, False])
        return order.first()

    rows = session.collect(
        TABLE,
        lambda table: table.group_by("gpu").agg(
            samples=pl.len().cast(pl.Int64),
            peak_used_bytes=used.max(),
            peak_sec=at_peak("timestamp_sec"),
            free_bytes=at_peak("free_bytes"),
            mean_used_bytes=used.mean(),
            utilization_mean_pct=utilization.mean(),
            utilization_p95_pct=utilization.quantile(0.95, interpolation="linear"),
        ),
    )
    known = {whole(gpu.get("gpu")): gpu for gpu in parts(session.metadata, "gpus")}
    return tuple(
        _gpu(row, known.get(row["gpu"], {})) for row in rows.sort("gpu").iter_rows(named=True)
    )


def _gpu(row: Mapping[str, Any], entry: Mapping[str, Any]) -> GpuUse:
    ranks = map(whole, listed(entry.get("workers")))
    return GpuUse(
        name=text(entry.get("name")),
        total_bytes=whole(entry.get("total_bytes")),
        workers=tuple(rank for rank in ranks if rank is not None),
        **row,
    )
