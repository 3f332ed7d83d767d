# SPDX-License-Identifier: Apache-2.0
"""Whose folder a session lies in, who may read it, and what it never holds."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis import open_session
from analysis.judgement.siblings import together
from analysis.tables.find import siblings
from profilemate.collector.lock import Lock
from profilemate.config import SESSION
from profilemate.format import processes
from profilemate.format.errors import SessionError
from profilemate.record.claim import claim, ensure_name, is_name
from profilemate.record.redact import redact
from tests.kv.children import Child, Say, said
from tests.kv.recording import hooks_only, only_session
from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens

NAME = "session_20260101_000000_1_abcdef"


def everything_under(folder: Path) -> list[Path]:
    return [folder, *sorted(folder.rglob("*"))]


def test_nobody_else_may_read(model: Path, hooks_on: None, tmp_path: Path) -> None:
    """Whatever the umask: folders are 0700 and files 0600."""
    before = os.umask(0)
    try:
        with hooks_only(tmp_path / "sessions"):
            build_scheduler(model, 10)
    finally:
        os.umask(before)
    paths = everything_under(tmp_path / "sessions")
    assert [path.name for path in paths if path.is_file()]
    for path in paths:
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_link_is_not_followed_as_a_session(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base = tmp_path / "base"
    base.mkdir()
    (base / NAME).symlink_to(elsewhere)
    with pytest.raises(SessionError, match="is not a folder of yours"):
        claim(base, NAME, "engine0")
    assert not list(elsewhere.iterdir())


def test_a_link_is_not_followed_as_a_journal(tmp_path: Path) -> None:
    """A dangling link in the journal's place: the file that it names does not appear."""
    place = claim(tmp_path, NAME, "engine0")
    os.close(place.fd)
    target = tmp_path / "target"
    (place.directory / "journal" / "engine1.journal").symlink_to(target)
    place = claim(tmp_path, NAME, "engine1")
    os.close(place.fd)
    assert place.directory.name == f"{NAME}_2"
    assert not target.exists()


def as_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folders made up to now be another user's than the process's."""
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)


def test_another_users_session_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir()
    as_somebody_else(monkeypatch)
    # The folder of sessions is root's, as it is where root runs this, and may be used.
    monkeypatch.setattr("profilemate.record.claim.make_base", lambda base: None)
    with pytest.raises(SessionError, match="is not a folder of yours"):
        claim(tmp_path, NAME, "engine0")


def test_another_users_base_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of root's is not: it is how an administrator makes a common place."""
    base = tmp_path / "base"
    base.mkdir()
    if os.geteuid() == 0:
        os.chown(base, 12_345, -1)
    else:
        as_somebody_else(monkeypatch)
    with pytest.raises(SessionError, match="belongs to another user"):
        claim(base, NAME, "engine0")


def test_a_folder_that_cannot_be_made_is_named(model: Path, hooks_on: None, tmp_path: Path) -> None:
    """One line that says what to do; vLLM has its scheduler."""
    (tmp_path / "file").write_text("")
    with said() as lines, hooks_only(tmp_path / "file" / "sessions"):
        assert build_scheduler(model, 10) is not None
    (line,) = lines
    assert "file/sessions" in line
    assert "VLLM_PROFILING_DIR" in line


def test_the_same_producer_again_opens_a_session_beside_it(tmp_path: Path) -> None:
    places = [claim(tmp_path, NAME, "engine0") for _ in range(3)]
    assert [p.directory.name for p in places] == [NAME, f"{NAME}_2", f"{NAME}_3"]
    other = claim(tmp_path, NAME, "engine1")
    assert other.directory == places[0].directory
    assert other.founding == places[0].founding
    for place in [*places, other]:
        os.close(place.fd)


def test_the_engines_of_one_program_are_siblings(
    model: Path, hooks_on: None, tmp_path: Path
) -> None:
    """Two schedulers side by side: a session each, with what that one did."""
    with hooks_only(tmp_path):
        schedulers = [build_scheduler(model, blocks) for blocks in (600, 40)]
        make = RequestMaker()
        for number, scheduler in enumerate(schedulers):
            for request in range(number + 1):
                scheduler.add_request(make(f"{number}-{request}", tokens(request, 64), 4))
        while any(scheduler.has_unfinished_requests() for scheduler in schedulers):
            for scheduler in schedulers:
                step(scheduler)
    folders = sorted(tmp_path.glob("session_*"))
    name = folders[0].name
    assert [folder.name for folder in folders] == [name, f"{name}_2"]
    found = together([open_session(folder) for folder in siblings(folders[1])])
    assert [(one.pool_blocks, one.requests) for one in found.sessions] == [(600, 1), (40, 2)]
    assert [one.session.siblings for one in found.summaries] == [(f"{name}_2",), (name,)]
    assert {one.session.state for one in found.summaries} == {"complete"}


def test_producers_that_race_agree(tmp_path: Path) -> None:
    """Eight processes open one session at the same moment: one founding, eight journals."""

    def producer(number: int) -> Callable[[Say], None]:
        def run(say: Say) -> None:
            while time.monotonic() < begin:
                pass
            place = claim(tmp_path, NAME, f"engine{number}")
            say([place.directory.name, place.founding.key.hex(), place.founding.origin_ns])

        return run

    begin = time.monotonic() + 0.5
    children = [Child(producer(number)) for number in range(8)]
    places = [next(child.rest()) for child in children]
    assert [child.end() for child in children] == [0] * 8
    assert places == [places[0]] * 8
    assert len(list((tmp_path / NAME / "journal").glob("*.journal"))) == 8


def test_a_session_name_stays_in_its_folder() -> None:
    assert not is_name("session_../../etc")
    assert not is_name("../session_1")
    assert not is_name("")
    environ = {SESSION: "session_a/b"}
    assert is_name(ensure_name(environ))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--api-key", "s3cret", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--api-key=s3cret"], ["--api-key=***"]),
        (["--api_key", "one", "two"], ["--api_key", "***", "***"]),
        (["--hf-token", "s3cret"], ["--hf-token", "***"]),
        (["--ssl-keyfile-password", "s3cret"], ["--ssl-keyfile-password", "***"]),
        (["--max-num-batched-tokens", "8192"], ["--max-num-batched-tokens", "8192"]),
        (["--tokenizer", "mine"], ["--tokenizer", "mine"]),
        (['{"api_key": "s3cret", "port": 1}'], ['{"api_key": "***", "port": 1}']),
        (["redis://user:s3cret@host:1"], ["redis://user:***@host:1"]),
        (["https://host/path"], ["https://host/path"]),
    ],
)
def test_secrets_are_redacted(given: list[str], kept: list[str]) -> None:
    assert redact(["vllm", "serve", *given]) == ["vllm", "serve", *kept]


def test_the_founding_holds_no_secret(
    model: Path, hooks_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line that a session keeps is the redacted one."""
    import sys

    monkeypatch.setattr(sys, "orig_argv", ["python", "serve.py", "--api-key", "s3cret"])
    place = claim(tmp_path, "session_mine", "engine0")
    os.close(place.fd)
    founding = json.loads((place.directory / "journal" / "session.json").read_text())
    assert founding["argv"] == ["python", "serve.py", "--api-key", "***"]
    with hooks_only(tmp_path / "other"):
        build_scheduler(model, 10)
    texts = [p.read_bytes() for p in only_session(tmp_path / "other").rglob("*") if p.is_file()]
    assert not any(b"s3cret" in text for text in texts)


def test_one_collector_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with Lock(tmp_path) as first:
        assert first.acquire()
        with Lock(tmp_path) as second:
            assert not second.acquire()
    with Lock(tmp_path) as third:
        assert third.acquire()


def test_one_collector_at_a_time_without_file_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none. There, who makes a file holds it for life."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "journal").mkdir()

    def collect(say: Say) -> None:
        lock = Lock(tmp_path)
        say(lock.acquire())
        time.sleep(600)

    child = Child(collect)
    assert child.next()
    with Lock(tmp_path) as second:
        assert not second.acquire()
        child.kill()
        child.end()
        assert second.acquire()


def test_a_later_process_with_the_same_number_is_another() -> None:
    start = processes.start_of(os.getpid())
    assert processes.is_alive(os.getpid(), start)
    assert not processes.is_alive(os.getpid(), str(int(start) + 1))
