# SPDX-License-Identifier: Apache-2.0
"""VLLM_PROFILING_UPLOAD: a session in the bucket can be read while it runs, and is whole at its
end, whatever the line does meanwhile; the recording waits for nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis import open_session
from analysis.tables.storage import Store
from profilemate import config
from profilemate.collector import follow, rotation
from profilemate.collector.rotation import Rotation
from profilemate.collector.snapshots import Asked
from profilemate.collector.uploads import Uploads
from profilemate.format import journal, session, upload
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.keep import Keep
from profilemate.record import launch
from profilemate.upload import sending
from profilemate.upload.__main__ import main
from profilemate.upload.progress import Progress
from profilemate.upload.sending import Sender
from tests.analysis.test_segments import differences, said
from tests.kv.recording import hooks_only, only_session
from tests.storage.s3 import SECRET, Front
from tests.storage.test_storage import without_note
from tests.support import segments
from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens

PATIENCE_SEC = 90.0


def wait_for(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_SEC
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def names_at(url: str) -> set[str]:
    return {each.name for each in Store(url).objects()}


def test_a_recording_in_segments_is_readable_while_it_runs_and_whole_at_its_end(
    model: Path,
    hooks_on: None,
    tmp_path: Path,
    front: Front,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's scheduler, the collector's own loop, and the uploader as a process of its own."""
    for module, name, value in (
        (journal, "FILE_BYTES", 20_000),
        (rotation, "JOURNAL_BYTES", 20_000),
        (follow, "MERGE_NS", 0),
        (follow, "POLL_SEC", 0.0),
        (follow, "METADATA_SEC", 0.1),
    ):
        monkeypatch.setattr(module, name, value)
    with hooks_only(tmp_path / "sessions", thread=False):
        monkeypatch.setenv("VLLM_PROFILING_KEEP", "all")
        monkeypatch.setenv("VLLM_PROFILING_UPLOAD", place)
        scheduler = build_scheduler(model, 60, max_num_seqs=8)
        folder = only_session(tmp_path / "sessions")
        url = f"{place}/{folder.name}"
        make, number = RequestMaker(), 0
        with Folder.own(folder) as own, own.folder("journal") as journals:
            work = follow._Work(own, journals, Asked())

            def closed() -> int:
                return len(work.follower.segments.closed)

            def go_on(until: Callable[[], bool]) -> None:
                nonlocal number
                give_up = time.monotonic() + PATIENCE_SEC
                while not until():
                    assert time.monotonic() < give_up
                    while len(scheduler.requests) < 10:
                        number += 1
                        scheduler.add_request(make(f"r-{number}", tokens(number % 9, 100), 4))
                    step(scheduler)
                    work._once()

            go_on(lambda: closed() >= 2)
            front.refuses = 3
            wait_for(lambda: work._once() or uploaded(folder).get("segments", 0) >= 2)  # type: ignore[func-returns-value]
            opened = open_session(url)
            assert opened.state == "running"
            assert opened.note is not None
            assert "still being uploaded" in opened.note
            assert len(opened.files.segments) >= 2
            assert said(url)["evictions"]["total"]["blocks"] > 0  # type: ignore[arg-type]
            metadata = json.loads((folder / "metadata.json").read_text())
            assert metadata["upload"]["url"] == url
            while scheduler.has_unfinished_requests():
                step(scheduler)
        process = work._uploads._process
        assert process is not None
    with Folder.own(folder) as own, own.folder("journal") as journals:
        monkeypatch.setenv("VLLM_PROFILING_UPLOAD", "")
        follow.follow(own, journals)
    assert json.loads((folder / "metadata.json").read_text())["complete"] is True
    assert process.wait(PATIENCE_SEC) == 0
    assert uploaded(folder)["complete"] is True
    expected, found = said(folder), said(url)  # type: ignore[arg-type]
    assert found["session"]["state"] == "complete"
    assert differences(without_note(found), without_note(expected)) == []
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert SECRET.encode() not in everything


def test_a_short_recording_is_in_the_bucket_when_its_collector_has_gone(
    model: Path,
    hooks_on: None,
    tmp_path: Path,
    front: Front,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the collector as vLLM starts it."""
    with hooks_only(tmp_path / "sessions", collector=True):
        monkeypatch.setenv("VLLM_PROFILING_UPLOAD", place)
        scheduler, make = build_scheduler(model, 60, max_num_seqs=8), RequestMaker()
        for number in range(20):
            scheduler.add_request(make(f"r-{number}", tokens(number % 9, 100), 4))
        folder = only_session(tmp_path / "sessions")
        wait_for((folder / "upload.json").exists)
        while scheduler.has_unfinished_requests():
            step(scheduler)
    wait_for(lambda: uploaded(folder).get("complete") is True)
    url = f"{place}/{folder.name}"
    expected, found = said(folder), said(url)  # type: ignore[arg-type]
    assert found["session"]["state"] == "complete"
    assert differences(without_note(found), without_note(expected)) == []


def uploaded(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "upload.json").read_bytes())
    except FileNotFoundError:
        return {}
    return found


@contextmanager
def running(large: Path, base: Path) -> Iterator[tuple[Path, Folder]]:
    """A session with two closed segments that goes on."""
    folder = shutil.copytree(large, base / large.name)
    segments.split(folder, segments.by_share(folder, 0.3), segments.by_share(folder, 0.6))
    (folder / "journal").mkdir()
    metadata = json.loads((folder / "metadata.json").read_text())
    change = {"complete": False, "ended_at": None}
    (folder / "metadata.json").write_text(json.dumps({**metadata, **change}))
    folder.chmod(0o700)
    with Folder.own(folder) as own:
        yield folder, own
        # The end of it.


def end(folder: Path, large: Path) -> None:
    (folder / "journal").rmdir()
    shutil.copy(large / "metadata.json", folder / "metadata.json")


@pytest.mark.usefixtures("front")
class TestSending:
    def test_the_closed_part_and_then_the_rest(
        self, large: Path, tmp_path: Path, place: str
    ) -> None:
        with running(large, tmp_path) as (folder, own):
            sender = Sender(own, place, Progress(own))
            assert sender.turn() is False
            assert "segments/0002/segment.json" in names_at(place)
            assert "requests.jsonl" not in names_at(place)
            assert open_session(place).state == "running"
            end(folder, large)
            assert sender.turn() is True
            assert (
                differences(
                    without_note(said(place)),  # type: ignore[arg-type]
                    without_note(said(folder)),
                )
                == []
            )

    def test_pipes_and_links_in_the_folder_are_not_sent(
        self, large: Path, tmp_path: Path, place: str
    ) -> None:
        with running(large, tmp_path) as (folder, own):
            os.mkfifo(folder / "a-pipe")
            (folder / "a-link").symlink_to("/etc/passwd")
            end(folder, large)
            assert Sender(own, place, Progress(own)).turn() is True
            assert names_at(place).isdisjoint(("a-pipe", "a-link"))
            assert open_session(place).state == "complete"

    @pytest.mark.parametrize("content", ["[]", "5", '{"tables": 5}'])
    def test_an_index_that_is_none_is_said(
        self, large: Path, tmp_path: Path, place: str, content: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(large, tmp_path) as (folder, own):
            (folder / "segments" / "0002" / "segment.json").write_text(content)
            progress = Progress(own)
            sender = Sender(own, place, progress)
            monkeypatch.setattr(Sender, "is_orphaned", True)
            assert sending.upload(sender, progress) == 0
            assert (progress.segments, progress.problem) == (1, "the session is damaged")

    def test_who_comes_anew_sends_no_segment_again(
        self, large: Path, tmp_path: Path, place: str, front: Front
    ) -> None:
        with running(large, tmp_path) as (_, own):
            Sender(own, place, Progress(own)).turn()
            front.seen.clear()
            progress = Progress(own)
            Sender(own, place, progress).turn()
            assert progress.segments == 2
            sent = [path for method, path in front.seen if method == "PUT"]
            assert sent
            assert not any("segments/" in path for path in sent)

    def test_half_a_segment_is_not_read(
        self, large: Path, tmp_path: Path, place: str, front: Front
    ) -> None:
        with running(large, tmp_path) as (_, own):
            Sender(own, place, Progress(own)).turn()
            Store(place).remove("segments/0002/segment.json")
            assert len(open_session(place).files.segments) == 1

    def test_what_is_not_confirmed_does_not_count(
        self, large: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(large, tmp_path) as (_, own):
            progress = Progress(own)
            sender = Sender(own, place, progress)
            monkeypatch.setattr(Store, "size_of", lambda self, name: None)
            with pytest.raises(SessionError, match="is not there though it was sent"):
                sender.turn()
            assert progress.segments == 0

    def test_a_segment_that_was_removed_is_missed(
        self, large: Path, tmp_path: Path, place: str
    ) -> None:
        with running(large, tmp_path) as (folder, own):
            progress = Progress(own)
            sender = Sender(own, place, progress)
            (folder / "segments/0001/segment.json").unlink()
            sender.turn()
            assert (progress.segments, progress.missed) == (2, 1)

    def test_a_store_that_does_not_answer_is_tried_again(
        self,
        large: Path,
        tmp_path: Path,
        place: str,
        front: Front,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        waits: list[float] = []
        with running(large, tmp_path) as (folder, own):
            progress = Progress(own)
            sender = Sender(own, place, progress)
            front.refuses = 10**6

            def wait(seconds: float) -> None:
                if seconds < 1:
                    return  # Between the tries of one request.
                waits.append(seconds)
                if len(waits) == 3:
                    assert "does not answer" in uploaded(folder)["problem"]
                    front.refuses = 0
                    end(folder, large)

            monkeypatch.setattr(
                sending,
                "time",
                SimpleNamespace(sleep=wait, time=time.time, monotonic=time.monotonic),
            )
            assert sending.upload(sender, progress) == 0
            assert uploaded(folder) == {
                "segments": 2,
                "missed": 0,
                "problem": None,
                "complete": True,
            }
        assert waits == [2, 4, 8]
        lines = capfd.readouterr().err.splitlines()
        assert len([line for line in lines if line.startswith("no upload: ")]) == 1
        assert SECRET not in "".join(lines)


class TestBeside:
    def test_without_obstore_it_is_said_and_not_tried_again(
        self, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(large, tmp_path) as (folder, own):
            monkeypatch.setattr("profilemate.upload.__main__.find_spec", lambda name: None)
            assert main([str(folder), "s3://bucket/x"]) == upload.MISSING
            monkeypatch.setattr("profilemate.collector.uploads.FIRST_WAIT_SEC", 0.0)
            uploads = Uploads("s3://bucket/x", own)
            state = uploads.state()
            assert state is not None
            assert state["problem"].endswith("pip install obstore")
            ended = [sys.executable, "-c", f"raise SystemExit({upload.MISSING})"]
            monkeypatch.setattr("profilemate.collector.uploads.uploader", lambda *_: ended)
            uploads.turn()
            assert uploads._process is not None
            uploads._process.wait(PATIENCE_SEC)
            first = uploads._process
            uploads.turn()
            uploads.turn()
            assert uploads._process is first

    def test_there_is_one_uploader(self, large: Path, tmp_path: Path) -> None:
        with running(large, tmp_path) as (folder, own), own.folder("journal") as journals:
            import fcntl
            import os

            held = journals.open(upload.LOCK_FILE, os.O_RDWR | os.O_CREAT)
            fcntl.flock(held, fcntl.LOCK_EX)
            assert main([str(folder), "s3://bucket/x"]) == 0
            os.close(held)
            assert uploaded(folder) == {}

    @pytest.mark.parametrize(
        "said", [b"[]", b"{", b'{"segments": "x", "problem": 1}', b"1" * 10**6]
    )
    def test_whatever_upload_json_says(self, tmp_path: Path, said: bytes) -> None:
        (tmp_path / "upload.json").write_bytes(said)
        with Folder.own(tmp_path) as own:
            uploads = Uploads("s3://bucket/x", own)
            assert uploads.confirmed == 0
            assert uploads.state() == {
                "url": f"s3://bucket/x/{tmp_path.name}",
                "segments": 0,
                "dropped": 0,
                "problem": None,
            }

    @pytest.mark.parametrize(
        ("confirmed", "left", "dropped"), [(0, [3, 4, 5, 6], 2), (4, [5, 6], 0), (6, [5, 6], 0)]
    )
    def test_what_waits_is_kept_twice_as_much(
        self, confirmed: int, left: list[int], dropped: int
    ) -> None:
        """Six segments of 100 bytes, of which 200 are to be kept."""
        closed = [SimpleNamespace(number=n, size=100, end_sec=float(n)) for n in range(1, 7)]
        known = SimpleNamespace(closed=closed)
        known.remove_first = lambda: known.closed.pop(0)
        follower = SimpleNamespace(
            segments=known,
            position=0,
            tables=SimpleNamespace(bytes_written=0),
            session_size=lambda: 100 * len(known.closed),
        )
        uploads = SimpleNamespace(is_wanted=True, confirmed=confirmed, dropped=0)
        Rotation(follower, Keep(200, None), uploads).remove_old()  # type: ignore[arg-type]
        assert ([each.number for each in known.closed], uploads.dropped) == (left, dropped)


class TestConfiguration:
    @pytest.mark.parametrize(
        ("value", "url"),
        [
            ("s3://bucket/runs/", "s3://bucket/runs"),
            (" gs://bucket ", "gs://bucket"),
            ("", ""),
            ("https://bucket", ""),
            (f"s3://me:{SECRET}@bucket", ""),
            (f"s3://bucket?key={SECRET}", ""),
        ],
    )
    def test_the_url(self, value: str, url: str) -> None:
        found = config.read({config.UPLOAD: value})
        assert found.upload == url
        assert len(found.problems) == (not url and bool(value))
        assert SECRET not in "".join(found.problems)

    def test_the_collector_gets_credentials_only_for_an_upload(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.delenv(config.UPLOAD, raising=False)
        assert "AWS_SECRET_ACCESS_KEY" not in launch._environment()
        monkeypatch.setenv(config.UPLOAD, "s3://bucket")
        assert launch._environment()["AWS_SECRET_ACCESS_KEY"] == SECRET


def test_the_command_finds_its_modules(tmp_path: Path) -> None:
    """Isolated from PYTHONPATH, and from the folder in which it starts."""
    ended = subprocess.run(
        upload.uploader(str(tmp_path / "none"), "s3://bucket"),
        cwd="/",
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "No such file" in ended.stderr
    assert session.JOURNAL_FOLDER not in ended.stderr
