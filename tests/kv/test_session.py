# SPDX-License-Identifier: Apache-2.0
"""Whose folder a session lies in, who may read it, and what it never holds."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis import open_session
from analysis.judgement.siblings import together
from analysis.tables.find import siblings
from profilemate import messages
from profilemate.collector.lock import Lock
from profilemate.config import SESSION
from profilemate.format import processes
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.session import Founding
from profilemate.record import claim as claiming
from profilemate.record.claim import Settle, claim, ensure_name, is_name
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


ABSURD_FOLDERS = (
    "x" * 5_000,
    "/".join(["x" * 200] * 100),
    "/dev/null",
    "/dev/null/x",
    "/proc/x",
    "\x1b[31m\u202e" + "x" * 5_000,
    "file",
)


@pytest.mark.parametrize("folder", ABSURD_FOLDERS, ids=lambda folder: ascii(folder)[:12])
def test_a_folder_that_nobody_can_use_is_one_line(
    model: Path, hooks_on: None, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    # No other test has said it in this process.
    monkeypatch.setattr(messages, "_said", {})
    with said() as lines, hooks_only(Path(folder)):
        assert build_scheduler(model, 10) is not None
    (line,) = lines
    assert line.startswith("profilemate: off, cannot write to ")
    assert line.endswith("VLLM_PROFILING_DIR to a folder of yours); vLLM runs without it")
    assert line.isprintable()
    assert len(line) < 1_000
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "variables",
    [
        {"SESSION": "../../elsewhere"},
        {"SESSION": "session_/x"},
        {"SESSION": "session_" + "x" * 1_000},
        {"SESSION": "session_\u0661_\u0661_\u0661_x"},
        {"SESSION": "\x1b[31m", "GPU_INTERVAL": "nan", "GPU_TIMING": "-1", "VERBOSE": "\udcff"},
        {"FAILED": "x" * 100_000},
        {"FAILED": "\x1b[31m,,,/,\udcff"},
    ],
    ids=ascii,
)
def test_absurd_variables_cost_nothing(
    model: Path, hooks_on: None, tmp_path: Path, variables: dict[str, str]
) -> None:
    """The session is recorded as ever, in its folder and nowhere else."""
    sessions = tmp_path / "sessions"
    with said() as lines, hooks_only(sessions), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(f"VLLM_PROFILING_{name}", value)
        build_scheduler(model, 10)
        # It is the name that children get.
        assert is_name(os.environ[SESSION])
    assert len(list(lines)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]
    assert (only_session(sessions) / "journal" / "engine0.journal").exists()


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


def test_nobody_else_may_write_above_it(tmp_path: Path) -> None:
    """The folders that lead to the sessions are made, too, and no umask opens them."""
    before = os.umask(0)
    try:
        os.close(claim(tmp_path / "a" / "b" / "sessions", NAME, "engine0").fd)
    finally:
        os.umask(before)
    modes = [folder.stat().st_mode & 0o777 for folder in (tmp_path / "a").rglob("*")]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    assert modes
    assert not any(mode & 0o022 for mode in modes)


@pytest.mark.parametrize("joining", ["has read its founding", "is about to read it"])
@pytest.mark.parametrize("moment", ["closed", "removed", "removed in part"])
def test_a_session_that_is_closed_in_this_very_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, joining: str
) -> None:
    """Between two steps of a process that joins: that one opens its own session, and leaves
    nothing behind."""
    os.close(claim(tmp_path, NAME, "engine0").fd)
    journals, done = tmp_path / NAME / "journal", tmp_path / "done"
    look = claiming._found

    def found(folder: Folder, session_id: str, keep: str, settle: Settle | None) -> Founding | None:
        founding = look(folder, session_id, keep, settle)
        if session_id != NAME:
            return founding
        (journals / "session.json").rename(journals / "closed.json")
        if moment != "closed":
            journals.rename(done)
        if moment == "removed in part":
            (done / "closed.json").unlink()
        return (
            founding
            if joining == "has read its founding"
            else look(folder, session_id, keep, settle)
        )

    monkeypatch.setattr(claiming, "_found", found)
    place = claim(tmp_path, NAME, "engine1")
    os.close(place.fd)
    assert place.directory.name == f"{NAME}_2"
    assert not [*tmp_path.glob(f"{NAME}/*/engine1.journal"), *done.glob("engine1.journal")]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../session_1",
        "session_../../etc",
        "session_a/b",
        "session_a\\b\n",
        "session_a\x01",
        "session_\udcff",
        "session_" + "x" * 300,
        "session_" + "\u00e4" * 120,
    ],
)
def test_a_name_that_is_none_is_replaced(tmp_path: Path, name: str) -> None:
    """Whatever the environment says, the session lies in the folder of sessions."""
    assert not is_name(name)
    environ = {SESSION: name}
    made = ensure_name(environ)
    assert is_name(made)
    assert environ[SESSION] == made
    place = claim(tmp_path, made, "engine0")
    os.close(place.fd)
    assert place.directory.parent == tmp_path


def test_the_longest_name_has_room_for_a_number(tmp_path: Path) -> None:
    name = "session_" + "x" * 192
    assert is_name(name)
    for number in range(2):
        place = claim(tmp_path, name, "engine0")
        os.close(place.fd)
        assert place.directory.name == (name if number == 0 else f"{name}_2")


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


def test_a_process_of_another_host_has_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that they share: their clocks are not."""
    folders = []
    for host in ("one", "another", "another"):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        place = claim(tmp_path, "session_mine", f"engine{len(folders)}")
        os.close(place.fd)
        folders.append(place.directory.name)
    assert folders == ["session_mine", "session_mine_2", "session_mine_2"]


def test_one_collector_at_a_time(tmp_path: Path) -> None:
    with Folder.own(tmp_path) as journals:
        with Lock(journals) as first:
            assert first.acquire()
            with Lock(journals) as second:
                assert not second.acquire()
        with Lock(journals) as third:
            assert third.acquire()


def test_one_collector_at_a_time_without_file_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none. There, who makes a file holds it for life."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    def collect(say: Say) -> None:
        lock = Lock(Folder.own(tmp_path))
        say(lock.acquire())
        time.sleep(600)

    child = Child(collect)
    assert child.next()
    with Folder.own(tmp_path) as journals, Lock(journals) as second:
        assert not second.acquire()
        child.kill()
        child.end()
        assert second.acquire()


def test_a_holder_that_was_killed_before_it_wrote_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lock, "acquire", Lock._acquire_without_locks)
    file = tmp_path / "collector.pid"
    file.touch()
    with Folder.own(tmp_path) as journals, Lock(journals) as lock:
        assert not lock.acquire()
        os.utime(file, (0, 0))
        assert lock.acquire()


def test_a_later_process_with_the_same_number_is_another() -> None:
    start = processes.start_of(os.getpid())
    assert processes.is_alive(os.getpid(), start)
    assert not processes.is_alive(os.getpid(), str(int(start) + 1))
