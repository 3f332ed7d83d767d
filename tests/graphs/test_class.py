# SPDX-License-Identifier: Apache-2.0
"""A class of CUDA graphs that is not as it was is left alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from profilemate.hooks.gpu import graphs
from profilemate.record.recorder import Recorder


class Tomorrow:
    """A CUDAGraph whose replay takes the stream to run on."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self, stream: Any = None) -> Any:
        return stream


class Less:
    """A CUDAGraph without a way to end a capture."""

    def capture_begin(self) -> None: ...

    def replay(self) -> None: ...


@pytest.mark.parametrize("graph_class", [Tomorrow, Less])
def test_a_class_that_is_not_known_stays_as_it_is(tmp_path: Path, graph_class: Any) -> None:
    before = dict(vars(graph_class))
    fd = os.open(tmp_path / "journal", os.O_WRONLY | os.O_CREAT)
    recorder = Recorder(fd, {}, "worker 0")
    recorded = graphs.Graphs(recorder, None)
    with recorded.part.attaching():
        graphs.watch(recorded, graph_class)
    assert recorded.part.lost
    assert recorded.executions.lost
    assert dict(vars(graph_class)) == before
    recorder.close()
    assert Tomorrow().replay("stream") == "stream"
