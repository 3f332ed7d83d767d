# SPDX-License-Identifier: Apache-2.0
"""A class of CUDA graphs that is not as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from profilemate.hooks.gpu import graphs
from profilemate.hooks.gpu.gpu_timer import GpuTimer
from profilemate.record.recorder import Recorder
from tests.support.guests import FORMS, Guests


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


def test_a_class_that_is_not_known_stays_as_it_is(tmp_path: Path) -> None:
    before = dict(vars(Less))
    fd = os.open(tmp_path / "journal", os.O_WRONLY | os.O_CREAT)
    recorder = Recorder(fd, {}, "worker 0")
    recorded = graphs.Graphs(recorder, None)
    with recorded.part.attaching():
        graphs.watch(recorded, Less)
    assert recorded.part.lost
    assert recorded.executions.lost
    assert dict(vars(Less)) == before
    recorder.close()


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("form", ["itself", *FORMS])
def test_a_replay_that_takes_more_or_is_another_tools(
    tmp_path: Path, form: str, timed: bool
) -> None:
    before = dict(vars(Tomorrow))
    graph, tools = Tomorrow(), Guests()
    if form != "itself":
        for name in ("capture_begin", "capture_end", "replay"):
            tools.on_class(Tomorrow, name, form, (), lambda: graph)
    fd = os.open(tmp_path / "journal", os.O_WRONLY | os.O_CREAT)
    recorder = Recorder(fd, {}, "worker 0")
    recorded = graphs.Graphs(recorder, GpuTimer(Mock()) if timed else None)
    with recorded.part.attaching():
        graphs.watch(recorded, Tomorrow)
    graph.capture_begin()
    graph.capture_end()
    assert graph.replay() is None
    takes_more = not form.startswith(("renamed", "by place", "swapped"))
    if takes_more:
        assert graph.replay("stream") == "stream"
    assert not recorded.part.lost
    assert [entry.graphs for entry in recorded.recent] == [1 + takes_more]
    recorder.fail("graphs", RuntimeError("over"))
    tools.leave()
    assert dict(vars(Tomorrow)) == before
    recorder.close()
