# SPDX-License-Identifier: Apache-2.0
"""What recording adds to a model execution with CUDA graphs: python -m benchmarks.graph_replay

Two model runners take turns, one of them recorded. They are as small as can be: a call that
decides how the batch runs, as vLLM's has it, and the replay of graphs that do nothing, which
vLLM's real CUDAGraphWrapper has captured with a stand-in for torch.cuda.CUDAGraph. So no GPU is
needed, and what is measured is what recording costs the host. Both run small batches of
executions, hundreds of times, which of them first is drawn anew each time; of the differences in
CPU time of the thread the median counts. The whole is repeated for its spread.

  python -m benchmarks.graph_replay                          one graph, 33 pieces, and with pauses
  python -m benchmarks.graph_replay --repeats 3 --pairs 200  shorter
  python -m benchmarks.graph_replay --null                   off against off: the noise
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import environment
from benchmarks.command import Options, count, progress, run
from benchmarks.pairs import Times, compare, note
from benchmarks.result import BenchmarkError, Result, Target, middle
from profilemate.collector.decode import Shape, episodes, events_of
from profilemate.collector.journal_reader import JournalReader
from profilemate.format.events import Op
from profilemate.format.journal import Kind
from profilemate.hooks.gpu import executions, graphs
from profilemate.record import writer
from profilemate.record.recorder import Recorder

TARGET = Target(2.0)

PIECES = 33
"""CUDA graphs of a piecewise model with 32 layers."""

IN_BATCH = {1: 20, PIECES: 4}
"""Executions that are timed together, by the CUDA graphs of each."""

PAUSE_SEC = 1.1 * writer.PAUSE_SEC
"""An execution that ends so long after the one before is written by itself."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=count, default=1000, help="of batches in a repeat (1000)")
    parser.add_argument("--repeats", type=count, default=7, help="of each comparison (7)")
    parser.add_argument("--null", action="store_true", help="compare off with off")


def measure(options: Options) -> list[Result]:
    """Microseconds that recording adds."""
    environment.need_vllm()
    return [
        _one_graph(options),
        _pieces(options),
        _written(options),
    ]


def _one_graph(options: Options) -> Result:
    with _sides(1, recorded=not options.null) as sides:
        found = [_compare(sides, options.pairs, seed) for seed in range(options.repeats)]
    return middle(
        "CUDA graph replay",
        [each.added for each in found],
        "µs",
        TARGET,
        note(found, "an execution"),
    )


def _pieces(options: Options) -> Result:
    with _sides(PIECES, recorded=not options.null) as sides:
        found = [_compare(sides, options.pairs // 4, seed) for seed in range(options.repeats)]
    added = [each.added / PIECES for each in found]
    name = f"CUDA graph replay, each of {PIECES} pieces"
    return middle(name, added, "µs", TARGET, note(found, "an execution"))


def _written(options: Options) -> Result:
    """Of executions with pauses, as models have them: what ran before has left the caches."""
    pairs = max(1, options.pairs // 20)
    with _sides(1, recorded=not options.null) as sides:
        found = [_compare(sides, pairs, seed, PAUSE_SEC) for seed in range(options.repeats)]
    name = f"CUDA graph replay every {1e3 * PAUSE_SEC:.0f} ms"
    return middle(name, [each.added for each in found], "µs", None, note(found, "an execution"))


def _compare(sides: tuple[Any, Any], pairs: int, seed: int, pause_sec: float = 0) -> Times:
    """Run both in turn; the second is recorded."""
    size = 1 if pause_sec else IN_BATCH[len(sides[0].graphs)]

    def timed(runner: Any) -> int:
        time.sleep(pause_sec)
        return _time(runner, size)

    (found,) = compare([partial(timed, runner) for runner in sides], pairs, size, seed)
    return found


def _time(runner: Any, executions: int) -> int:
    """Nanoseconds of CPU time that so many executions take."""
    output = SimpleNamespace(total_num_scheduled_tokens=7)
    now = time.thread_time_ns
    began = now()
    for _ in range(executions):
        runner.execute_model(output)
    return now() - began


class _Runner:
    """A model runner that replays its graphs, called as vLLM's GPUModelRunner is."""

    def __init__(self, graphs: list[Any], answer: tuple[Any, ...]) -> None:
        self.graphs = graphs
        self.answer = answer
        self.executed = 0

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        tokens = scheduler_output.total_num_scheduled_tokens
        self._determine_batch_execution_and_padding(
            num_tokens=tokens,
            num_reqs=tokens,
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=1,
            use_cascade_attn=False,
            num_encoder_reqs=0,
            allow_microbatching=True,
        )
        for graph in self.graphs:
            graph.replay()
        self.executed += 1

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,
        max_num_scheduled_tokens: int,
        use_cascade_attn: bool = False,
        allow_microbatching: bool = True,
        force_eager: bool = False,
        num_encoder_reqs: int = 0,
    ) -> tuple[Any, ...]:
        return self.answer


@contextmanager
def _sides(pieces: int, *, recorded: bool) -> Iterator[tuple[_Runner, _Runner]]:
    """Two model runners of so many graphs, the second of which is recorded.

    Raises:
        BenchmarkError: not every execution is in the journal.

    """
    with tempfile.TemporaryDirectory() as scratch:
        journal = Path(scratch, "worker0.journal")
        fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        recorder = Recorder(fd, {"producer": "worker", "rank": 0}, "worker 0", writer.PAUSE_SEC)
        graph_class = _graph_class()
        if recorded:
            recorded_graphs = graphs.Graphs(recorder, None)
            graphs.watch(recorded_graphs, graph_class)
        off, on = _runner(_graph_class(), pieces), _runner(graph_class, pieces)
        if recorded:
            executions.watch(on, executions.Executions(recorded_graphs))
        yield off, on
        recorder.close()
        progress(f"{on.executed:,} executions of {pieces} CUDA graphs recorded")
        wanted = (on.executed, on.executed * pieces) if recorded else (0, 0)
        if _in_journal(journal) != wanted:
            raise BenchmarkError(f"{_in_journal(journal)} is recorded of {wanted}")


def _graph_class() -> type[Any]:
    """In place of torch.cuda.CUDAGraph; each side has one of its own, as hooks change it."""

    class CUDAGraph:
        replays = 0

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...

        def capture_end(self) -> None: ...

        def replay(self) -> None:
            self.replays += 1

    return CUDAGraph


def _runner(graph_class: type[Any], pieces: int) -> _Runner:
    """A model runner whose graphs are captured by vLLM's own wrappers."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

    from tests.graphs.cuda import Cuda

    mode = CUDAGraphMode.PIECEWISE if pieces > 1 else CUDAGraphMode.FULL
    descriptor = BatchDescriptor(num_tokens=8, num_reqs=None if pieces > 1 else 8)
    settings: Any = SimpleNamespace(compilation_config=None, use_cumem_cudagraph_pool=False)
    context = ForwardContext(
        no_compile_layers={},
        attn_metadata=None,
        slot_mapping={},
        cudagraph_runtime_mode=mode,
        batch_descriptor=descriptor,
    )
    with Cuda(graph_class=graph_class), override_forward_context(context):
        wrappers = [CUDAGraphWrapper(list, settings, mode) for _ in range(pieces)]
        for wrapper in wrappers:
            wrapper()
    captured = [wrapper.concrete_cudagraph_entries[descriptor].cudagraph for wrapper in wrappers]
    return _Runner(captured, (mode, descriptor, False, None, None))


def _in_journal(journal: Path) -> tuple[int, int]:
    """The executions in a journal, and the CUDA graphs that they replayed."""
    reader = JournalReader(journal)
    number = replayed = 0
    while frames := reader.read():
        for kind, payload, _ in frames:
            if kind is Kind.EVENTS:
                for episode in episodes(payload, Shape(0, 0), lambda _: []):
                    executed = events_of(episode, Op.EXECUTION)
                    number += len(executed)
                    replayed += sum(event[4] for event in executed)
    reader.close()
    return number, replayed


if __name__ == "__main__":
    run(__doc__, add_options, measure)
