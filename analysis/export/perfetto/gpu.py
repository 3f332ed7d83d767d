# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and GPUs: captures and executions as slices, memory as values over time."""

from __future__ import annotations

import polars as pl

from analysis.export.clock import Clock
from analysis.export.part import Part
from analysis.export.perfetto.packets import Packets
from analysis.export.perfetto.tracks import Tracks
from analysis.gpu import captures
from analysis.gpu.executions import NONE
from analysis.gpu.executions import TABLE as EXECUTIONS
from analysis.tables.session import Session

_MEMORY = "gpu_memory"

_CAPTURED = ("num_graphs", "memory_bytes", "source", "kind", "part", "num_reqs")
_EXECUTED = ("num_tokens", "unpadded_tokens", "num_reqs", "gpu_us", "dummy", "num_graphs")


def write(
    session: Session, part: Part, packets: Packets, tracks: Tracks, clock: Clock
) -> tuple[int, int]:
    """Write the captures, the executions and the GPUs' memory; returns how many of the first two.

    An execution is the host's time in the replays of its graphs, which ends when all of it was
    launched. One without a graph is an instant at that time.

    Raises:
        SessionError: a table cannot be read.

    """
    captured = _captures(session, part, packets, tracks, clock)
    executed = _executions(session, part, packets, tracks, clock)
    columns = ("timestamp_sec", "gpu", "used_bytes", "free_bytes", "utilization_pct")
    for batch in session.batches(_MEMORY, columns):
        for at_sec, gpu, used, free, busy in batch.filter(part.is_in(_MEMORY)).iter_rows():
            above, at = tracks.top(f"GPU {gpu}", 2000 + gpu), clock.ns(at_sec)
            packets.count(tracks.counter(above, "memory used", "bytes", 0), at, used)
            packets.count(tracks.counter(above, "memory free", "bytes", 1), at, free)
            if busy is not None:
                packets.count(tracks.counter(above, "utilization", "%", 2), at, round(busy))
    return captured, executed


def _captures(session: Session, part: Part, packets: Packets, tracks: Tracks, clock: Clock) -> int:
    begin = pl.col("capture_time_sec")
    rows = captures.read(session).filter(
        begin >= session.begin_sec, part.covers(begin, begin + pl.col("duration_sec").fill_null(0))
    )
    ended: dict[int, int] = {}
    for worker, mode, tokens, at_sec, took_sec, *args in rows.select(
        "worker", "runtime_mode", "num_tokens", "capture_time_sec", "duration_sec", *_CAPTURED
    ).iter_rows():
        track = tracks.worker(worker, "Captures", 0)
        at = max(clock.ns(at_sec), ended.get(worker, clock.begin_ns))
        ended[worker] = max(at, clock.ns(at_sec + (took_sec or 0)))
        packets.begin(track, at, f"{mode} {tokens}", zip(_CAPTURED, args, strict=True))
        packets.end(track, ended[worker])
    return rows.height


def _executions(
    session: Session, part: Part, packets: Packets, tracks: Tracks, clock: Clock
) -> int:
    executed = 0
    ended: dict[int, int] = {}
    columns = ("timestamp_sec", "worker", "runtime_mode", "launch_us", *_EXECUTED)
    for batch in session.batches(EXECUTIONS, columns):
        rows = batch.filter(part.is_in(EXECUTIONS))
        executed += rows.height
        for at_sec, worker, mode, took_us, *args in rows.iter_rows():
            track, end = tracks.worker(worker, "Executions", 1), clock.ns(at_sec)
            name = "eager" if mode == NONE else f"{mode} {args[0]}"
            if took_us is None:
                packets.instant(track, end, name, zip(_EXECUTED, args, strict=True))
                continue
            begin = max(end - round(took_us * 1e3), ended.get(worker, clock.begin_ns))
            ended[worker] = max(begin, end)
            packets.begin(track, begin, name, zip(_EXECUTED, args, strict=True))
            packets.end(track, ended[worker])
    return executed
