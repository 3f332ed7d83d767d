# SPDX-License-Identifier: Apache-2.0
"""``profilemate live --once``: one frame of a real scheduler's session, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from profilemate.live import frame, reading
from profilemate.live.disk import Disk
from profilemate.live.frame import VERSION
from profilemate.live.holders import Holder
from profilemate.live.prefixes import Hottest, Prefix
from profilemate.live.rates import Figures, Graphs, Median
from profilemate.live.watching import (
    EngineView,
    ProcessView,
    SnapshotsView,
    View,
    Watcher,
    WorkerView,
)
from tests.analysis.invoke import invoke
from tests.analysis.test_schemas import check as check_by_schema
from tests.live.figures import totals, write
from tests.live.running import Running
from tests.support.scheduler import tokens

DOCS = Path(__file__).parents[2] / "docs" / "live.md"
HOSTILE = "[red]x[/red]\x1b[31m\u202e" + "y" * 50


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "_LATE_SEC", 0.0)


def once(*arguments: object) -> Any:
    """What the command says, with as short a wait as may be."""
    return invoke("live", "--once", "--interval", "0.2", *arguments)


def busy(live: Running) -> None:
    """Two requests run, and others wait for a place."""
    live.add(HOSTILE, tokens(1, 64), 100)
    live.step(2)
    for number in range(5):
        live.add(f"request-{number}", tokens(1, 48) + tokens(5 + number, 10), 60)
    live.step(3)
    live.write()


def test_the_figures_are_those_of_the_scheduler(live: Running) -> None:
    busy(live)
    watcher = Watcher(live.folder)
    first = watcher.view()
    live.step(100)
    live.write()
    second = watcher.view()
    assert (first.state, first.notes) == ("running", ())
    (engine,) = first.engines
    pool = live.scheduler.kv_cache_manager.block_pool
    assert engine.total_blocks == pool.num_gpu_blocks - 1 == 40
    assert (engine.running, engine.waiting, engine.waits_for) == (4, 2, "max_num_seqs")
    # 64 tokens of the first one; then three that ask for 58 and find 48.
    assert engine.run.hit_rate == pytest.approx(3 * 48 / (64 + 3 * 58))
    (engine,) = second.engines
    assert engine.held_blocks + engine.cached_blocks + engine.free_blocks == 40
    assert engine.held_blocks == 40 - pool.get_num_free_blocks()
    (window,) = engine.windows
    # A step takes 10.1 ms of the session's clock.
    assert window.steps_per_sec == pytest.approx(1 / 0.0101)
    assert window.seconds == pytest.approx(1.01)
    assert engine.requests_ended == 4
    assert {each.request_id: each.blocks for each in second.holders or ()} == {
        name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e"): count
        for name, count in live.held.items()
    }


def test_text(live: Running) -> None:
    busy(live)
    shown = once(live.folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.isascii()
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "4 requests running, 2 waiting (as many run as may)" in shown.stdout
    assert "KV cache  ##########" in shown.stdout
    # A client's text is no markup and drives no terminal, and is no longer than its column.
    assert r"[red]x[/red]\x1b[31m\u202e" in shown.stdout
    assert "y" * 50 not in shown.stdout


@pytest.mark.parametrize("width", [20, 80, 100, 150, 200])
def test_no_line_is_wider_than_the_terminal(live: Running, width: int) -> None:
    from profilemate.live.text import How, draw

    busy(live)
    lines = draw(Watcher(live.folder).view(), How(width=width, is_ascii=True))
    assert max(line.cell_len for line in lines) <= width
    if width >= 80:
        words = " ".join(" ".join(line.plain for line in lines).split())
        for piece in ("of 40 blocks", "In all: 0 evictions", "reused", "Prefill / decode tok/s"):
            assert piece in words


def test_json_has_the_documented_keys(live: Running) -> None:
    busy(live)
    shown = once("--json", live.folder)
    check_by_schema("live", shown.stdout)
    content = json.loads(shown.stdout)
    assert content["live_version"] == VERSION
    (session,) = content["sessions"]
    assert list(session) == [field.name for field in fields(View)]
    assert session["engines"][0]["running"] == 4
    known = (
        *(View, EngineView, Figures, Median, Holder, Hottest, Prefix, WorkerView, Graphs),
        *(reading.Gpu, reading.Pool, ProcessView, SnapshotsView, Disk),
    )
    named = set(re.findall(r"`(\w+)`", DOCS.read_text()))
    for each in known:
        assert is_dataclass(each)
        assert {field.name for field in fields(each)} <= named


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    def fails(*arguments: object) -> str:
        result = once(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("profilemate: ")
        return str(result.stderr)

    folder = tmp_path / "session_x"
    assert "there is no folder" in fails(folder)
    write(folder, totals())
    (folder / "metadata.json").write_text('{"format_version": 1}')
    assert once(folder).returncode == 0
    (folder / "totals.json").write_text("{")
    assert "totals.json is damaged" in fails(folder)
    (folder / "totals.json").unlink()
    assert "no totals.json yet" in fails(folder)
    assert "write --once --json" in invoke("live", "--json", folder).stderr
    assert "is no interval" in invoke("live", "--interval", "0", folder).stderr
    assert "live needs a terminal" in invoke("live", folder).stderr


def test_what_the_collector_took_is_a_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "session_x", totals())
    taken = [
        {"name": f"session_x_snapshot_{number}", "reason": "reset: \x1b[2J", "at_sec": number}
        for number in (1, 2)
    ]
    many = {"taken": taken, "left_out": 1_234, "failed": 5}
    of_many = "2 taken, 1,234 left out by the limit, 5 failed; the last one: session_x_snapshot_2"
    for log, words in (
        (None, None),
        ({"taken": [], "left_out": 0, "failed": 0}, "0 taken"),
        (many, rf"{of_many} (reset: \x1b[2J)"),
        ({"taken": 7, "left_out": -1, "failed": "x"}, "0 taken"),
    ):
        (folder / "metadata.json").write_text(json.dumps({"format_version": 1, "snapshots": log}))
        shown = " ".join(once(folder).stdout.split())
        assert ("Snapshots" in shown) is (words is not None)
        assert words is None or f"Snapshots {words}" in shown


def test_damaged_metadata_is_a_note(tmp_path: Path) -> None:
    folder = write(tmp_path / "session_x", totals())
    (folder / "metadata.json").write_text("{")
    shown = once(folder)
    assert shown.returncode == 0
    assert "Note:" in shown.stdout
    assert "not JSON" in " ".join(shown.stdout.split())


def test_a_session_that_ends_is_silent_or_gone(live: Running) -> None:
    busy(live)
    watcher = Watcher(live.folder)
    assert watcher.view().state == "running"
    live.write(age_sec=60)
    view = watcher.view()
    assert view.state == "silent"
    assert "nothing new for" in view.notes[0]
    live.end()
    view = watcher.view()
    assert (view.state, view.notes) == ("ended", ())
    shutil.rmtree(live.folder)
    view = watcher.view()
    assert view.notes == ("the session's folder is gone: these are its last figures",)
    assert view.engines[0].total_blocks == 40


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_another_user_s_is_read_and_said(live: Running) -> None:
    busy(live)
    os.chown(live.folder, 65534, 65534)
    view = Watcher(live.folder).view()
    assert view.state == "running"
    assert "this is a session of" in view.notes[0]


def test_the_newest_that_runs_is_taken(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    busy(live)
    folder = live.folder.parent
    newer = write(folder / "session_20270101_000000_1_aaaaaa", totals(ended=True))
    (newer / "metadata.json").write_text('{"format_version": 1}')
    older = write(folder / "session_20250101_000000_1_aaaaaa", totals())
    (older / "metadata.json").write_text('{"format_version": 1}')
    monkeypatch.setenv("VLLM_PROFILING_DIR", str(folder))
    assert json.loads(once("--json").stdout)["sessions"][0]["path"] == str(live.folder)
    assert json.loads(once("--json", folder).stdout)["sessions"][0]["path"] == str(live.folder)
    both = json.loads(once("--json", newer, live.folder).stdout)["sessions"]
    assert [each["state"] for each in both] == ["ended", "running"]
    shutil.rmtree(older)
    live.write(age_sec=100)
    assert "is running; name one" in once().stderr


def test_it_writes_nothing(live: Running) -> None:
    busy(live)
    before = {path: path.stat() for path in live.folder.rglob("*")}
    once(live.folder)
    after = {path: path.stat() for path in live.folder.rglob("*")}
    assert {path: (info.st_mtime_ns, info.st_size) for path, info in before.items()} == {
        path: (info.st_mtime_ns, info.st_size) for path, info in after.items()
    }


def test_how_uneven_experts_are(tmp_path: Path) -> None:
    (worker,) = totals()["workers"]
    layers = [
        {"layer": 0, "routed_tokens": 8, "by_expert": [10, 6]},
        {"layer": 1, "routed_tokens": 4, "by_expert": [5, 3]},
    ]
    folder = write(tmp_path / "session_1", totals(workers=[{**worker, "experts": layers}]))
    (folder / "metadata.json").write_text('{"format_version": 1}')
    shown = once(folder).stdout
    assert re.search(r"Experts, worker 2 +the busiest has 1\.25 times the mean", shown)
    (found,) = json.loads(once("--json", folder).stdout)["sessions"][0]["workers"]
    assert (found["expert_imbalance"], found["run_expert_imbalance"]) == (None, 1.25)
