# SPDX-License-Identifier: Apache-2.0
"""A recording that stands still, or has stopped, is said to: in totals.json, the metrics and live.

Of the real scheduler."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from analysis.wording.formats import duration
from profilemate.live.watching import Watcher
from profilemate.record import recorder
from profilemate.record.journal_writer import JournalWriter
from tests.analysis.invoke import invoke
from tests.live.running import Running
from tests.support.scheduler import tokens


def process_of(live: Running) -> dict[str, Any]:
    """The engine's process, as totals.json has it."""
    (process,) = json.loads((live.folder / "totals.json").read_bytes())["processes"]
    return dict(process)


def states_of(live: Running) -> dict[str, float]:
    """The same as metrics: by state."""
    lines = invoke("metrics", live.folder).stdout.splitlines()
    found = [line.split(" ") for line in lines if line.startswith("profilemate_recorder_state{")]
    return {name.partition('state="')[2].partition('"')[0]: float(value) for name, value in found}


def once(live: Running) -> str:
    """What one look shows, in one line."""
    return " ".join(invoke("live", live.folder, "--once").stdout.split())


def test_a_pause_says_since_when(live: Running) -> None:
    (recording,) = recorder._living()
    began = live.clock.now
    live.add("request", tokens(1, 100), 400)
    live.step(5)
    live.write()
    assert (process_of(live)["recording"], process_of(live)["paused_since_ns"]) == ("on", None)
    assert states_of(live) == {"on": 1, "paused": 0, "stopped": 0, "ended": 0}
    (engine,) = Watcher(live.folder).view().engines
    assert (engine.running, engine.waiting, engine.paused_since_sec) == (1, 0, None)
    recording.wants_pause = True
    live.step()
    paused_ns = live.clock.now - began
    live.step(200)
    live.write()
    process = process_of(live)
    assert process["recording"] == "paused"
    # It paused between two steps; a step takes 10.1 ms.
    assert 0 <= paused_ns - process["paused_since_ns"] < 21_000_000
    assert states_of(live) == {"on": 0, "paused": 1, "stopped": 0, "ended": 0}
    view = Watcher(live.folder).view()
    (engine,) = view.engines
    since = process["paused_since_ns"] / 1e9
    assert (engine.running, engine.waiting, engine.paused_since_sec) == (None, None, since)
    shown = once(live)
    assert f"Engine 0 paused since {duration(since)}: blocks are as of then" in shown
    assert f"the recording of engine 0 is paused since {duration(since)} of the session" in shown
    assert "requests running" not in shown
    recording.wants_pause = False
    live.step(5)
    live.write()
    assert process_of(live)["recording"] == "on"
    assert "1 request running" in once(live)


def test_one_that_stopped_is_said_and_why(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails once."""
    live.add("request", tokens(1, 100), 200)
    live.step(5)
    live.write()
    append, calls = JournalWriter.append, []

    def failing(self: JournalWriter, data: bytes, events: int = 0) -> None:
        calls.append(events)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        append(self, data, events)

    monkeypatch.setattr(JournalWriter, "append", failing)
    live.step(5)
    live.write()
    assert calls[0] > 0
    process = process_of(live)
    assert process["recording"] == "stopped"
    assert process["dropped_events"] > 0
    assert states_of(live) == {"on": 0, "paused": 0, "stopped": 1, "ended": 0}
    assert "the recording of engine 0 has stopped (journal: Input/output error)" in once(live)
    live.end()
    assert process_of(live)["recording"] == "stopped"


def test_one_whose_process_has_gone_has_ended(live: Running) -> None:
    live.add("request", tokens(1, 100), 2)
    live.step(5)
    recorder.close_all()
    live.write()
    assert process_of(live)["recording"] == "ended"
    assert Watcher(live.folder).view().notes == ()
