# SPDX-License-Identifier: Apache-2.0
"""Whatever is captured, replayed, cleared and executed, in any order, is in the journal."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs.recording import Batch, Execution, Recording

steps = st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 4, 5, 7, 9, 12]), max_size=6)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("execute"), steps),
        st.tuples(st.just("dummy"), st.integers(1, 40)),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("fail"), steps),
        st.tuples(st.just("capture"), st.none()),
        st.tuples(st.just("replay"), st.integers(0, 5)),
        st.tuples(st.just("eager"), steps),
    ),
    max_size=30,
)


class Expected:
    """What has to be in the journal, counted from what was asked for alone."""

    def __init__(self) -> None:
        self.entries: list[tuple[Batch | None, str]] = []
        self.graphs: list[int] = []
        self.executions: list[Execution] = []
        self.replays: dict[int, int] = {}
        self.captured: dict[Batch, int] = {}

    def execute(self, tokens: list[int], dummy: int, pieces: int, *, run: str = "graph") -> None:
        """A batch is executed: ``graph``, or ``eager`` whatever it was dispatched to."""
        number = sum(tokens)
        if not number:
            return
        uniform = not dummy and set(tokens) == {1}
        padded = next((size for size in (1, 2, 4, 8, 16) if size >= number), number)
        batch: Batch = ("NONE", padded, None, 0, 0)
        replayed = 0
        if number <= 16 and run == "graph":
            is_full = uniform and number <= 8
            batch = ("FULL", padded, padded, 1, 0) if is_full else ("PIECEWISE", padded, None, 0, 0)
            graphs = 1 if is_full else pieces
            if batch in self.captured:
                replayed = graphs
            else:
                self.captured[batch] = self._new(batch, "CUDAGraphWrapper", graphs)
        self.executions.append(Execution(batch, number, replayed, dummy))

    def capture_by_hand(self) -> int:
        """A graph is captured by nobody in particular."""
        return self._new(None, "unknown", 1)

    def _new(self, batch: Batch | None, source: str, graphs: int) -> int:
        self.entries.append((batch, source))
        self.graphs.append(graphs)
        return len(self.entries)


@settings(max_examples=60)
@given(pieces=st.integers(1, 4), asked=actions)
def test_random(model: Path, groups: None, pieces: int, asked: list[Any]) -> None:
    import torch
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    from tests.graphs.cuda import Cuda
    from tests.graphs.steps import Output
    from tests.graphs.toys import Runner

    expected = Expected()
    by_hand: list[tuple[int, Any]] = []
    with Cuda() as cuda, tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder, "worker0.journal"), cuda.graph_class)
        runner = Runner(_config(model), cuda, pieces)
        recording.watch(runner)
        for action, argument in asked:
            if action == "execute":
                output = runner.execute_model(Output(argument))
                expected.execute(argument, 0, pieces)
                if output is not None:
                    assert output.tolist() == runner.outputs(sum(argument))
            elif action == "dummy":
                runner._dummy_run(argument)
                requests = min(argument, 8)
                expected.execute([argument - requests + 1] + [1] * (requests - 1), 1, pieces)
            elif action == "clear":
                CUDAGraphWrapper.clear_all_graphs()
                expected.captured.clear()
            elif action == "fail":
                runner.fail_with = KeyError("asked for")
                try:
                    runner.execute_model(Output(argument))
                except KeyError:
                    expected.execute(argument, 0, pieces, run="eager")
                runner.fail_with = None
            elif action == "eager":
                runner.run_eagerly = True
                runner.execute_model(Output(argument))
                expected.execute(argument, 0, pieces, run="eager")
                runner.run_eagerly = False
            elif action == "capture":
                graph = cuda.graph_class()
                with torch.cuda.graph(graph):
                    torch.zeros(1)
                by_hand.append((expected.capture_by_hand(), graph))
            elif by_hand:
                number, graph = by_hand[argument % len(by_hand)]
                graph.replay()
                expected.replays[number] = expected.replays.get(number, 0) + 1
        found = recording.end()

    assert [(entry.batch, entry.source) for entry in found.entries.values()] == expected.entries
    assert [found.graphs_of(number) for number in found.entries] == expected.graphs
    assert found.executions == expected.executions
    replays: dict[int, int] = {}
    for number, graphs in found.replays:
        replays[number] = replays.get(number, 0) + graphs
    assert replays == expected.replays
    assert cuda.count("replay") == sum(replays.values()) + sum(
        execution.graphs for execution in found.executions
    )


_configs: dict[Path, Any] = {}


def _config(model: Path) -> Any:
    from tests.graphs.toys import config

    if model not in _configs:
        _configs[model] = config(model)
    return _configs[model]
