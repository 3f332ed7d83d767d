# SPDX-License-Identifier: Apache-2.0
"""``profilemate snapshot``: what a session has now, as a session of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session
from analysis.tables.find import find_session
from benchmarks import large_session
from profilemate.format import snapshot
from profilemate.format.folder import Folder
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import assert_fails
from tests.analysis.test_segments import differences, said
from tests.analysis.test_segments_of_running import Collector, numbers, running  # noqa: F401
from tests.live import figures
from tests.support import segments

USAGE = "kv_cache_usage.csv"


def taken(*arguments: object) -> Path:
    """The snapshot that the command makes."""
    result = invoke("snapshot", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return Path(result.stdout.removesuffix("\n"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A session of an hour in four segments of ten minutes each, and an open one of 20."""
    folder = tmp_path / "session_20260131_120000_4711_c0ffee"
    large_session.write(folder, 2_000)
    segments.cut_at(folder, *(600 * number for number in range(1, 5)))
    return folder


def unlike(snapshot: Path, of: Path, **options: Any) -> list[str]:
    """Which figures of a snapshot differ, but for what a snapshot is."""
    found = differences(said(snapshot), said(of, **options))
    return [each for each in found if not each.startswith((".session.", ".cost.table_bytes"))]


def test_all_of_a_complete_session(large: Path) -> None:
    snapshot = taken(large)
    assert snapshot.parent == large.parent
    assert re.fullmatch(rf"{large.name}_snapshot_\d{{8}}_\d{{6}}Z", snapshot.name)
    assert unlike(snapshot, large) == []
    found = open_session(snapshot)
    metadata = json.loads((snapshot / "metadata.json").read_text())
    at = metadata["snapshot"]["taken_at"]
    assert (found.state, found.note) == (
        "complete",
        f"it is a snapshot of {large.name}, taken {at} (by hand)",
    )
    assert found.end_sec == open_session(large).end_sec
    assert metadata["session_id"] == open_session(large).metadata["session_id"]
    assert metadata["snapshot"] == {
        "of": large.name,
        "taken_at": at,
        "begin_sec": 0,
        "was_running": False,
        "reason": "by hand",
    }
    for path in [snapshot, *snapshot.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert [child.name for child in large.parent.iterdir() if child.name.startswith(".")] == []


def test_marks_are_kept(large: Path) -> None:
    assert not (taken(large, "-o", large.parent / "without") / "marks.jsonl").exists()
    (large / "marks.jsonl").write_text('{"timestamp_sec": 900.5, "text": "a mark"}\n')
    snapshot = taken(large, "-o", large.parent / "with")
    assert [mark["text"] for mark in said(snapshot)["session"]["marks"]] == ["a mark"]
    assert (snapshot / "marks.jsonl").stat().st_mode & 0o777 == 0o600


def test_packed_files_of_ones_own_are_linked(large: Path) -> None:
    first, second = sorted((large / "segments").glob("0001/*.gz"))[:2]
    first.chmod(0o600)
    second.chmod(0o644)
    snapshot = taken(large)
    assert os.path.samefile(first, snapshot / first.relative_to(large))
    copy = snapshot / second.relative_to(large)
    assert not os.path.samefile(second, copy)
    assert copy.read_bytes() == second.read_bytes()
    shutil.rmtree(large)
    assert open_session(snapshot).scan("kv_cache_evictions").collect().height == 2_000


def test_where_nothing_can_be_linked(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    for path in (large / "segments").glob("*/*"):
        path.chmod(0o600)
    monkeypatch.setattr(os, "link", refused)
    assert unlike(taken(large), large) == []


@pytest.mark.parametrize(
    ("last", "first"), [("1s", 4), ("1200s", 4), ("21m", 4), ("31m", 3), ("41m", 2), ("2h", 1)]
)
def test_the_last_segments(large: Path, last: str, first: int) -> None:
    """The open one begins at 40 minutes. One before it is always there."""
    folders = sorted(path.name for path in (taken(large, "--last", last) / "segments").iterdir())
    assert folders == [f"{number:04d}" for number in range(first, 5)]


def test_a_part_says_what_the_session_says_of_the_same_time(large: Path) -> None:
    written = sum(path.stat().st_size for path in large.glob("*.csv"))
    written += sum(
        entry["plain_bytes"]
        for index in (large / "segments").glob("*/segment.json")
        for entry in json.loads(index.read_text())["tables"].values()
    )
    SessionBuilder(large).metadata(cost={"table_bytes": written})
    snapshot = taken(large, "--last", "25m")
    opened = open_session(snapshot)
    assert opened.window is not None
    assert opened.begin_sec == opened.window.begin_sec == 1800
    assert opened.window.removed_segments == 3
    found, whole = said(snapshot), said(large, after_sec=1800)
    for section in ("allocations", "lifetimes", "requests", "prefix_cache", "scheduling"):
        assert differences(found[section], whole[section]) == []
    assert not any("bytes of tables" in warning for warning in found["warnings"])
    text = " ".join(invoke("summary", snapshot).stdout.split())
    assert "what came before is not in this snapshot" in text


def test_of_what_is_left_of_a_run(large: Path) -> None:
    segments.remove_before(large, 3)
    snapshot = taken(large)
    assert unlike(snapshot, large) == []
    assert open_session(snapshot).window == open_session(large).window
    again = taken(snapshot, "-o", large.parent / "again")
    assert unlike(again, large) == []
    assert open_session(again).note is not None
    assert snapshot.name in str(open_session(again).note)


def test_a_session_without_segments(session: SessionBuilder) -> None:
    session.usage((1, 10), (3, 20))
    snapshot = taken(session.folder, "--last", "1s")
    assert (snapshot / USAGE).read_bytes() == (session.folder / USAGE).read_bytes()
    assert not (snapshot / "segments").exists()
    assert unlike(snapshot, session.folder) == []


def test_a_session_without_metadata(session: SessionBuilder) -> None:
    session.usage((1, 10), (3, 20))
    (session.folder / "metadata.json").unlink()
    assert open_session(taken(session.folder)).end_sec == 3


class TestRunning:
    def test_it_is_taken_up_to_its_last_finished_line(
        self,
        running: SessionBuilder,  # noqa: F811
    ) -> None:
        collector = Collector(running)
        for _ in range(3):
            collector.write(3)
            collector.begin_to_close()
            collector.write(2)
            collector.close()
        collector.begin_to_close()
        collector.write(2)
        running.append(USAGE, "99.0,torn")
        whole_run = json.dumps(figures.totals())
        (running.folder / "totals.json").write_text(whole_run)
        snapshot = taken(running.folder)
        assert not (snapshot / "journal").exists()
        opened = open_session(snapshot)
        assert (opened.state, opened.goes_on) == ("complete", True)
        assert opened.end_sec == open_session(running.folder).end_sec == collector.written
        assert numbers(opened, "kv_cache_usage") == [*range(1, collector.written + 1)]
        assert unlike(snapshot, running.folder) == []
        # What was being closed, and the open rows, are in one file.
        assert (snapshot / USAGE).read_text().count("timestamp_sec") == 1
        assert (snapshot / "totals.json").read_text() == whole_run
        metadata = json.loads((snapshot / "metadata.json").read_text())
        assert metadata["ended_at"] == f"2026-01-31T12:00:{collector.written:02d}.000000Z"

    def test_what_it_holds_is_no_leak(self, running: SessionBuilder) -> None:  # noqa: F811
        """Its tables need not reach equally far, and no table contradicts another for that."""
        running.usage((1, 50))
        running.rows(
            "kv_cache_allocations.csv",
            {"event": "allocate", "num_blocks": 1, "evicted_blocks": 1, "request_id": "a"},
        )
        found = said(taken(running.folder))
        assert found["warnings"] == []
        assert found["holders"]["leaked_blocks"] == 0

    def test_gaps_stay_gaps(self, running: SessionBuilder) -> None:  # noqa: F811
        running.metadata(complete=False, ended_at=None, dropped_events=3)
        running.usage((1, 50))
        opened = open_session(taken(running.folder))
        assert opened.state == "cut off"
        assert "snapshot" in (opened.note or "")
        assert "gaps" in (opened.note or "")

    def test_while_segments_are_closed_and_removed(
        self,
        running: SessionBuilder,  # noqa: F811
        tmp_path: Path,
    ) -> None:
        collector = Collector(running)
        collector.write(1)
        collector.start()
        try:
            for number in range(20):
                snapshot = taken(running.folder, "-o", tmp_path / f"{number}")
                found = numbers(open_session(snapshot), "kv_cache_usage")
                assert found == [*range(found[0], found[-1] + 1)]
        finally:
            collector.is_to_end.set()
            collector.join()

    def test_a_segment_that_goes_meanwhile(
        self,
        running: SessionBuilder,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        collector = Collector(running)
        for _ in range(4):
            collector.write(3)
            collector.begin_to_close()
            collector.close()
        link, left = snapshot.link, [3]

        def linking(source: Folder, target: Folder, name: str) -> None:
            left[0] -= 1
            if not left[0]:
                collector.remove()
            link(source, target, name)

        monkeypatch.setattr(snapshot, "link", linking)
        assert numbers(open_session(taken(running.folder)), "kv_cache_usage") == [*range(4, 13)]


class TestRefused:
    def test_what_is_there(self, large: Path, tmp_path: Path) -> None:
        for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")):
            target = tmp_path / "there"
            make(target)
            assert_fails(invoke("snapshot", large, "-o", target), f"{target} is there already")
            target.rmdir() if target.is_dir() else target.unlink()

    def test_where_nothing_can_be_written(self, large: Path, tmp_path: Path) -> None:
        target = tmp_path / "no" / "folder"
        assert_fails(invoke("snapshot", large, "-o", target), f"cannot write {target}: No such")

    def test_nothing_is_left_of_one_that_failed(self, large: Path, tmp_path: Path) -> None:
        name = "kv_cache_evictions.0002.csv.gz"
        (large / "segments" / "0002" / name).unlink()
        (large / "segments" / "0002" / name).mkdir()
        base = tmp_path / "base"
        base.mkdir()
        assert_fails(invoke("snapshot", large, "-o", base / "target"), "Is a directory")
        assert [*base.iterdir()] == []

    def test_no_session(self, tmp_path: Path) -> None:
        assert_fails(invoke("snapshot", tmp_path / "nowhere"), "there is no folder")


def test_the_newest_session_is_not_its_snapshot(large: Path) -> None:
    snapshot = taken(large)
    os.utime(large, (0, 0))
    assert find_session(large.parent) == large
    half = large.with_name(f".{large.name}_99")
    shutil.copytree(large, half)
    assert find_session(large.parent) == large
    shutil.rmtree(large)
    assert find_session(large.parent) == snapshot
