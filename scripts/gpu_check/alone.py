# SPDX-License-Identifier: Apache-2.0
"""Are real CUDA graphs counted and timed as they should be, with the hooks alone?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from profilemate.format.events import Op

from .recording import Runner, batch, recording
from .report import Report, spread

SIZES = (1, 8, 64, 512)
REPLAYS = 25
"""Of the first graph; each further one is replayed once more."""

TIMED = 40
"""Replays that are timed."""
LEAST_MS = 3.0
"""What a timed replay takes at least on the GPU, so that what lies around it does not count."""
COPIED_BYTES = 64 << 20
TOLERANCE = 0.05


def captured_copy(size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """A graph that copies its input to its output, and the two."""
    given = torch.zeros(size, device="cuda")
    made = torch.zeros(size, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.copy_(given)
    return graph, given, made


def check_counts(report: Report, folder: Path) -> None:
    """Captures and replays, and that a replay does what was captured."""
    works = []
    with recording(folder, "counts") as recorded:
        for number, size in enumerate(SIZES):
            graph, given, made = captured_copy(size)
            for replay in range(REPLAYS + number):
                given.fill_(float(replay))
                graph.replay()
            recorded.graphs.record_recent()
            works.append(made.tolist() == [float(REPLAYS + number - 1)] * size)
    report.check("replays do what was captured", works, [True] * len(SIZES))
    report.check("captures", len(recorded.events(Op.CAPTURE)), len(SIZES))
    replays = Counter[int]()
    for _, entry, graphs, *_ in recorded.events(Op.REPLAY):
        replays[entry] += graphs
    wanted = {number + 1: REPLAYS + number for number in range(len(SIZES))}
    report.check("replays by graph", dict(replays), wanted)
    unhooked = not hasattr(torch.cuda.CUDAGraph.replay, "__wrapped__")
    report.hold("torch is as it was afterwards", unhooked, "CUDAGraph.replay is torch's own")


def check_times(report: Report, folder: Path) -> None:
    """The time on the GPU, against CUDA events around the same replays."""
    source = torch.ones(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copies = _copies_for(source, target)
    ours: list[float] = []
    around: list[float] = []
    with recording(folder, "times", timed=True) as recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(copies):
                target.copy_(source)
        graph._profilemate_entry.of_model = True
        runner = Runner(graph.replay, 8)
        recorded.watch(runner)
        for _ in range(TIMED):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            runner.execute_model(batch(8))
            after.record()
            torch.cuda.synchronize()
            around.append(before.elapsed_time(after))
    ours = [(event[6] - 1) / 1e6 for event in recorded.events(Op.EXECUTION) if event[6]]
    report.check("replays timed", len(ours), TIMED)
    if len(ours) == len(around):
        shares = [mine / theirs for mine, theirs in zip(ours, around, strict=True)]
        off = sum(ours) / sum(around) - 1
        report.note("a replay takes", spread(around, "ms"))
        report.note("profilemate's share of it", spread([100 * share for share in shares], "%"))
        report.hold(f"within {TOLERANCE:.0%} in all", abs(off) <= TOLERANCE, f"{off:+.2%}")


def _copies_for(source: torch.Tensor, target: torch.Tensor) -> int:
    """How many copies take LEAST_MS."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    before.record()
    for _ in range(8):
        target.copy_(source)
    after.record()
    after.synchronize()
    took_ms: float = before.elapsed_time(after)
    return max(1, round(8 * LEAST_MS / took_ms) + 1)
