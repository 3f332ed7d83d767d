# SPDX-License-Identifier: Apache-2.0
"""What do the hooks cost the host, a replay and a capture?

With and without them takes turns, in an order that is drawn for each pair; of the differences the
median counts.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .recording import Runner, batch, recording
from .report import Report, spread

PAIRS = 400
IN_BATCH = 20
"""Replays that are timed together; the GPU is waited for after them, outside the time."""
PIECES = 33
CAPTURES = 40
QUERIES = 200


def measure(report: Report, folder: Path) -> None:
    """Print what each costs."""
    plain = _unhooked()
    for pieces in (1, PIECES):
        for timed in (False, True):
            _replays(report, folder, plain, pieces, timed=timed)
    _captures(report, folder, plain)
    _memory_queries(report)


def _unhooked() -> type[Any]:
    """A class of graphs that keeps torch's own methods while the hooks are on."""
    names = ("capture_begin", "capture_end", "replay")
    methods = {name: getattr(torch.cuda.CUDAGraph, name) for name in names}
    return type("Unhooked", (torch.cuda.CUDAGraph,), methods)


def _replays(report: Report, folder: Path, plain: type[Any], pieces: int, *, timed: bool) -> None:
    with recording(folder, "costs", timed=timed) as recorded:
        off, on = _runner(plain, pieces), _runner(torch.cuda.CUDAGraph, pieces)
        recorded.watch(on)
        in_batch = max(1, IN_BATCH // pieces)
        pairs = PAIRS if pieces == 1 else PAIRS // 2
        without, with_it = _paired(
            lambda: _execute(off, in_batch), lambda: _execute(on, in_batch), pairs
        )
    scale = 1e-3 / in_batch / pieces
    added = [scale * (b - a) for a, b in zip(without, with_it, strict=True)]
    what = f"a replay, {pieces} an execution{', GPU time' if timed else ''}"
    took = scale * median(without)
    report.note(what, f"{took:.2f} us without, added {spread(added, 'us')}")


def _runner(graph_class: type[Any], pieces: int) -> Runner:
    graphs = [_captured(graph_class) for _ in range(pieces)]
    for graph in graphs:
        if hasattr(graph, "_profilemate_entry"):
            # As the pieces of a model, which are recorded with its execution.
            graph._profilemate_entry = graphs[0]._profilemate_entry
            graph._profilemate_entry.of_model = True

    def run() -> None:
        for graph in graphs:
            graph.replay()

    return Runner(run, 8)


def _captured(graph_class: type[Any]) -> Any:
    numbers = torch.zeros(1, device="cuda")
    graph = graph_class()
    with torch.cuda.graph(graph):
        numbers.add_(1)
    return graph


def _execute(runner: Runner, times: int) -> None:
    scheduled = batch(7)
    for _ in range(times):
        runner.execute_model(scheduled)


def _paired(
    without: Callable[[], None], with_it: Callable[[], None], pairs: int
) -> tuple[list[int], list[int]]:
    """Nanoseconds of the thread that each took, pair by pair."""
    draw = random.Random(0)
    sides, order = (without, with_it), [0, 1]
    times: tuple[list[int], list[int]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for _ in range(pairs):
            draw.shuffle(order)
            for index in order:
                began = time.thread_time_ns()
                sides[index]()
                times[index].append(time.thread_time_ns() - began)
                torch.cuda.synchronize()
    finally:
        gc.enable()
    return times


def _captures(report: Report, folder: Path, plain: type[Any]) -> None:
    with recording(folder, "captures"):
        without, with_it = _paired(
            lambda: _keep(_captured(plain)),
            lambda: _keep(_captured(torch.cuda.CUDAGraph)),
            CAPTURES,
        )
        _kept.clear()
    added = [1e-3 * (b - a) for a, b in zip(without, with_it, strict=True)]
    took = 1e-3 * median(without)
    report.note("a capture", f"{took:.1f} us without, added {spread(added, 'us')}")


_kept: list[Any] = []


def _keep(graph: Any) -> None:
    """Have a graph destroyed later, outside what is timed."""
    _kept.append(graph)


def _memory_queries(report: Report) -> None:
    took = []
    for _ in range(QUERIES):
        began = time.perf_counter_ns()
        torch.cuda.mem_get_info()
        took.append(1e-3 * (time.perf_counter_ns() - began))
    report.note("torch.cuda.mem_get_info", spread(took, "us"))
