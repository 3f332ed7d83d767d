# SPDX-License-Identifier: Apache-2.0
"""A worker's recording pauses and goes on: whole executions are recorded, or none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from profilemate.format.events import Op
from tests.graphs.recording import Recording
from tests.graphs.test_gpu_timer import Gpu
from tests.graphs.test_random import _config


@pytest.mark.parametrize("timed", [False, True])
def test_executions_of_a_pause_are_in_no_count(
    model: Path, groups: None, tmp_path: Path, timed: bool
) -> None:
    import torch

    from tests.graphs.cuda import Cuda
    from tests.graphs.steps import Output
    from tests.graphs.toys import Runner

    with Cuda() as cuda:
        gpu = Gpu() if timed else None
        recording = Recording(tmp_path / "worker0.journal", cuda.graph_class, gpu)
        runner = Runner(_config(model), cuda, 1)
        recording.watch(runner)

        def execute(tokens: int) -> None:
            output = runner.execute_model(Output([1] * tokens))
            assert output is None or output.tolist() == runner.outputs(tokens)

        execute(4)
        execute(4)
        recording.recorder.wants_pause = True
        execute(3)
        execute(8)
        graph = cuda.graph_class()
        with torch.cuda.graph(graph):
            torch.zeros(1)
        graph.replay()
        recording.recorder.wants_pause = False
        execute(2)
        execute(1)
        execute(8)
        graph.replay()
        found = recording.end()
    assert found.turns == [Op.PAUSE, Op.RESUME]
    # The execution in which it goes on had begun before.
    assert [(each.batch[1], each.tokens, each.graphs) for each in found.executions] == [
        (4, 4, 0),
        (4, 4, 1),
        (1, 1, 0),
        (8, 8, 1),
    ]
    assert [graphs for _, graphs in found.replays] == [1]
    # Graphs that were captured meanwhile are known.
    assert len(found.entries) == 5
