# SPDX-License-Identifier: Apache-2.0
"""Record CUDA graphs into a journal without vLLM, and read the journal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from profilemate.collector.decode import Shape, episodes, events_of
from profilemate.collector.journal_reader import JournalReader
from profilemate.format.events import Op
from profilemate.format.journal import Kind
from profilemate.hooks.gpu import executions, graphs
from profilemate.hooks.gpu.gpu_timer import GpuTimer
from profilemate.record.recorder import WORKER_PAUSE_SEC, Recorder


class Recording:
    """A journal, and what the hooks write into it while it is open."""

    def __init__(self, journal: Path, *, timed: bool) -> None:
        self.journal = journal
        fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self.recorder = Recorder(
            fd, {"producer": "worker", "rank": 0}, "worker 0", WORKER_PAUSE_SEC
        )
        self.graphs = graphs.Graphs(self.recorder, GpuTimer(torch.cuda) if timed else None)
        graphs.watch(self.graphs, torch.cuda.CUDAGraph)

    def watch(self, runner: Runner) -> None:
        """Record this runner's executions, too."""
        executions.watch(runner, executions.Executions(self.graphs))

    def close(self) -> None:
        """Record what is left, and take the hooks away."""
        torch.cuda.synchronize()
        self.graphs.close()
        self.recorder.close()

    def events(self, op: Op) -> list[tuple[Any, ...]]:
        """The events of this op, in order."""
        found: list[tuple[Any, ...]] = []
        reader = JournalReader(self.journal)
        while frames := reader.read():
            for kind, payload, _ in frames:
                if kind is Kind.EVENTS:
                    for episode in episodes(payload, Shape(0, 0), lambda _: []):
                        found.extend(tuple(event) for event in events_of(episode, op))
        reader.close()
        return found


@contextmanager
def recording(folder: Path, name: str, *, timed: bool = False) -> Iterator[Recording]:
    """A recording that is closed after the block, and can be read then."""
    recorded = Recording(folder / f"{name}.journal", timed=timed)
    try:
        yield recorded
    finally:
        recorded.close()


class Runner:
    """Calls what it is given, as a model runner of vLLM's runs its model."""

    def __init__(self, run: Any, tokens: int) -> None:
        self._run = run
        self._answer = (None, SimpleNamespace(num_tokens=tokens))

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self._determine_batch_execution_and_padding(
            num_tokens=scheduler_output.total_num_scheduled_tokens
        )
        return self._run()

    def _determine_batch_execution_and_padding(self, num_tokens: int) -> Any:
        return self._answer


def batch(tokens: int) -> Any:
    """A scheduler's output with so many tokens."""
    return SimpleNamespace(total_num_scheduled_tokens=tokens)
