# SPDX-License-Identifier: Apache-2.0
"""Only one's own session is written to, whatever others put in the place of its names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from analysis import open_session, summarize
from analysis.renderers.text.summary import render
from analysis.tables.find import find_session
from profilemate import collector
from profilemate.collector.__main__ import _complete, _follow
from profilemate.collector.tables import COLUMNS
from profilemate.config import DIRECTORY
from profilemate.format import collecting
from profilemate.format.errors import SessionError
from profilemate.format.folder import owner_of
from profilemate.format.journal import Kind, frame
from tests.analysis.invoke import invoke
from tests.collector.journals import EngineJournal, metadata
from tests.kv.children import Child, Say, processes_with

NOBODY = 65_534
USAGE = "kv_cache_usage.csv"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")


def cut_off(sessions: Path) -> Path:
    """A session of an engine that was killed, and no collector."""
    engine = EngineJournal(sessions)
    for block in (1, 2, 3):
        engine.allocated(1_000 * block, block)
    engine.killed()
    return engine.folder


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Everything under a folder: times, modes, contents, targets of links."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        content: bytes | str = b""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = info.st_mode, info.st_mtime_ns, content
    return found


IN_SESSION = (*COLUMNS, "metadata.json", "kv_cache_summary.txt", "totals.json")


def victim_in(folder: Path) -> Path:
    """A folder with things in it that nobody may touch, under the names that profilemate uses."""
    victim = folder / "victim"
    (victim / "journal").mkdir(parents=True)
    for name in (*IN_SESSION, "thesis.txt"):
        (victim / name).write_text(f"{name}\n" * 100)
        (victim / "journal" / name).write_text(name)
    for name in ("session.json", "collector.lock", "collector.log", "engine0.journal"):
        (victim / "journal" / name).write_text(name)
    return victim


def given_away(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Make the folder another user's; returns the user's name."""
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, -1, follow_symlinks=False)
        return owner_of(folder.stat())
    mine = owner_of(folder.stat())
    somebody = os.geteuid() + 1
    patch.setattr(os, "geteuid", lambda: somebody)
    return mine


@pytest.mark.parametrize("ended", [True, False])
def test_another_users_session_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    folder = cut_off(tmp_path)
    os.utime(folder / "journal")
    owner = given_away(folder, monkeypatch)
    if not ended:
        (folder / "metadata.json").write_text('{"format_version": 1, "complete": false}')
    before = state_of(folder)
    opened = open_session(folder)
    assert opened.state == ("cut off" if ended else "running")
    note = (
        f"it belongs to {owner} and has not been completed; once vLLM has ended, 'profilemate "
        "finalize' as that user does it"
    )
    assert opened.note == note
    result = invoke("finalize", folder)
    assert result.returncode == 2
    assert result.stderr == f"profilemate: {folder} belongs to {owner}; run this as that user\n"
    with pytest.raises(SessionError, match=f"is not a folder of yours: it belongs to {owner}"):
        collector.finalize(folder)
    assert state_of(folder) == before


@needs_root
@pytest.mark.parametrize("what", ["session", "journal"])
@pytest.mark.parametrize("option", ["", "--complete", "--detach"])
def test_the_collector_follows_no_session_of_another_user(
    tmp_path: Path, what: str, option: str
) -> None:
    folder = cut_off(tmp_path)
    os.chown(folder if what == "session" else folder / "journal", NOBODY, -1)
    before = state_of(folder)
    command = collecting.command(*filter(None, [option]), str(folder))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == collecting.CANNOT_COMPLETE
    refused = folder if what == "session" else folder / "journal"
    assert ended.stderr == f"{refused} is not a folder of yours: it belongs to nobody\n"
    assert state_of(folder) == before


def test_a_complete_session_of_another_user_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_off(tmp_path)
    collector.finalize(folder)
    assert "belongs to" not in render(summarize(open_session(folder)))
    owner = given_away(folder, monkeypatch)
    assert f"Note: it belongs to {owner}\n" in render(summarize(open_session(folder)))
    result = invoke("finalize", folder)
    assert (result.returncode, result.stdout) == (0, f"{folder} is complete\n")


@needs_root
def test_ones_own_sessions_come_first_in_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write there, too. In a folder that was named the newest is taken."""
    base = tmp_path / "base"
    mine = cut_off(base)
    theirs = base / "session_20300101_000000_1_abcdef"
    shutil.copytree(mine, theirs)
    given_away(theirs, monkeypatch)
    linked = base / "session_20310101_000000_1_abcdef"
    linked.symlink_to(mine)
    os.chown(linked, NOBODY, -1, follow_symlinks=False)
    monkeypatch.setenv(DIRECTORY, str(base))
    assert find_session() == mine
    assert find_session(base) == linked
    assert "belongs to nobody" in (open_session(base).note or "")
    linked.unlink()
    assert find_session(base) == theirs
    shutil.rmtree(mine)
    assert find_session() == theirs


@needs_root
def test_a_folder_that_nobody_else_may_read_is_passed_over() -> None:
    """Another user's 0700 folder in a common place keeps nobody from finding the own session."""

    def look(say: Say) -> None:
        os.setuid(NOBODY)
        say(find_session(base).name)

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        base = Path(folder, "base")
        base.mkdir(mode=0o755)
        mine = cut_off(base)
        for path in [mine, *mine.rglob("*")]:
            os.chown(path, NOBODY, -1)
        (base / "session_20300101_000000_1_abcdef").mkdir(mode=0o700)
        child = Child(look)
        assert child.next() == mine.name
        assert child.end() == 0


def test_a_link_to_ones_own_session_is_a_session(tmp_path: Path) -> None:
    folder = cut_off(tmp_path / "sessions")
    latest = tmp_path / "latest"
    latest.symlink_to(folder)
    assert open_session(latest).state == "complete"
    folder = cut_off(tmp_path / "others")
    latest.unlink()
    latest.symlink_to(folder)
    result = invoke("finalize", latest)
    assert (result.returncode, result.stdout) == (0, f"{latest} is complete\n")
    assert metadata(folder)["complete"] is True


def test_journals_that_are_a_link_are_not_followed(tmp_path: Path) -> None:
    """Their every file was removed once."""
    folder = cut_off(tmp_path / "sessions")
    victim = tmp_path / "victim"
    shutil.copytree(folder / "journal", victim)
    shutil.rmtree(folder / "journal")
    (folder / "journal").symlink_to(victim)
    before = state_of(victim)
    for command in (["finalize", folder], ["summary", folder]):
        invoke(*command)
        assert state_of(victim) == before
    for option in (["--complete"], ["--detach"]):
        subprocess.run(
            collecting.command(*option, str(folder)), stderr=subprocess.DEVNULL, check=False
        )
        assert state_of(victim) == before


def test_a_journal_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    folder = cut_off(tmp_path / "sessions")
    journal = folder / "journal" / "engine0.journal"
    elsewhere = journal.rename(tmp_path / "elsewhere")
    journal.symlink_to(elsewhere)
    with pytest.raises(SessionError, match=r"symbolic links: .*engine0\.journal$"):
        collector.finalize(folder)
    assert [path.name for path in folder.iterdir()] == ["journal"]
    assert journal.is_symlink()


IN_JOURNAL = ("collector.lock", "collector.log", "collector.pid", "closed.json")


@pytest.mark.parametrize("name", [*IN_SESSION, *(f"journal/{name}" for name in IN_JOURNAL)])
def test_no_link_is_written_through(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At no name that the collector writes; the link is replaced, or one line says what it is."""
    target = tmp_path / "target"
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for number, run in enumerate((_complete, partial(_follow, detached=False))):
        target.write_text("of the victim\n")
        folder = cut_off(tmp_path / str(number))
        (folder / name).symlink_to(target)
        assert run(folder) in (collecting.COMPLETE, collecting.CANNOT_COMPLETE)
        assert target.read_text() == "of the victim\n"
        said = capfd.readouterr().err
        assert said.count("\n") == bool(said)


def test_no_link_is_written_through_as_a_log(tmp_path: Path) -> None:
    folder = cut_off(tmp_path / "sessions")
    target = tmp_path / "target"
    (folder / "journal" / "collector.log").symlink_to(target)
    subprocess.run(collecting.command("--detach", str(folder)), check=True)
    wait_until_gone = time.monotonic() + 60
    while processes_with(folder):
        assert time.monotonic() < wait_until_gone
        time.sleep(0.05)
    assert not target.exists()


def test_links_among_what_killed_processes_left_behind_go(tmp_path: Path) -> None:
    """What they lead to stays."""
    folder = cut_off(tmp_path / "sessions")
    victim = victim_in(tmp_path)
    before = state_of(victim)
    (folder / ".completing-abcdef").mkdir()
    for name in (".completing-fedcba", ".completing-abcdef/inside", ".journal-done-abcdef"):
        (folder / name).symlink_to(victim)
    collector.finalize(folder)
    assert not list(folder.glob(".*"))
    assert state_of(victim) == before


def test_a_session_that_is_swapped_for_a_link_while_it_is_completed(tmp_path: Path) -> None:
    """What was opened is completed, wherever it is now; what the link leads to stays as it is."""
    folder = cut_off(tmp_path / "sessions")
    victim = victim_in(tmp_path)
    before = state_of(victim)
    moved = tmp_path / "moved"

    def swap(done: int, total: int) -> None:
        if not moved.exists():
            folder.rename(moved)
            folder.symlink_to(victim)

    collector.finalize(folder, swap)
    assert state_of(victim) == before
    assert metadata(moved)["complete"] is True
    assert sorted(path.name for path in moved.iterdir()) == [
        "kv_cache_allocations.csv",
        "kv_cache_summary.txt",
        USAGE,
        "metadata.json",
        "scheduler_steps.csv",
        "totals.json",
    ]


@pytest.mark.parametrize("what", ["journal", "damaged journal", "scratch"])
def test_a_folder_in_the_session_that_is_swapped_for_a_link(tmp_path: Path, what: str) -> None:
    folder = cut_off(tmp_path / "sessions")
    if what == "damaged journal":
        with (folder / "journal" / "engine0.journal").open("ab") as file:
            file.write(frame(Kind.EVENTS, b"\xff" * 50))
    victim = victim_in(tmp_path)
    before = state_of(victim)

    def swap(done: int, total: int) -> None:
        place = next(folder.glob(".completing-*")) if what == "scratch" else folder / "journal"
        if not place.is_symlink():
            place.rename(tmp_path / "moved")
            place.symlink_to(victim / "journal")

    finish: Callable[[], None] = lambda: collector.finalize(folder, swap)  # noqa: E731
    if what != "scratch":
        with pytest.raises(SessionError, match="was moved or deleted while its tables were made"):
            finish()
        assert (tmp_path / "moved" / "engine0.journal").exists()
    else:
        finish()
        assert metadata(folder)["complete"] is True
    assert state_of(victim) == before
