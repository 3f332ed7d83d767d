# SPDX-License-Identifier: Apache-2.0
"""Completing never makes tables worse, and ends whatever a kill left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis import open_session
from profilemate import collector
from profilemate.collector import completing
from profilemate.collector.follow import follow
from profilemate.collector.follower import Follower
from profilemate.collector.lock import Lock
from profilemate.format import collecting
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.journal import MAGIC, Kind, frame
from tests.analysis.invoke import invoke
from tests.collector.journals import EngineJournal, metadata
from tests.kv.children import Child, Say

USAGE = "kv_cache_usage.csv"
PATIENCE_SEC = 60
FRAME_BYTES = 12
"""Of a frame, in front of its payload."""


def cut_off(sessions: Path, steps: int = 5, rank: int = 0) -> Path:
    """A session of an engine that was killed, and no collector."""
    engine = EngineJournal(sessions, rank)
    for step in range(steps):
        engine.allocated(1_000_000 * step, step + 1)
        engine.flush()
    engine.killed()
    return engine.folder


def followed(folder: Path) -> None:
    """What a collector has written that is killed now."""
    follower = Follower(folder, folder)
    follower.discover()
    while follower.read():
        follower.apply()
    follower.write(ended=False)


def frames_up_to(journal: bytes, count: int) -> bytes:
    """The journal's first frames, of which the header is one."""
    end = len(MAGIC)
    for _ in range(count):
        end += FRAME_BYTES + int.from_bytes(journal[end : end + 4], "little")
    return journal[:end]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the session but for its journals."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whole(sessions: Path) -> tuple[Path, dict[str, bytes], Path]:
    """A complete session, what it holds, and a copy of its journals."""
    folder = cut_off(sessions)
    journals = sessions / "journals"
    shutil.copytree(folder / "journal", journals)
    collector.finalize(folder)
    assert names(folder) == [
        "kv_cache_allocations.csv",
        "kv_cache_summary.txt",
        USAGE,
        "metadata.json",
        "scheduler_steps.csv",
        "totals.json",
    ]
    return folder, contents(folder), journals


@pytest.mark.parametrize("left", ["closed.json", "collector.lock", "nothing", "engine0.journal"])
@pytest.mark.parametrize("command", [True, False])
def test_a_complete_session_whose_journals_were_half_removed(
    tmp_path: Path, left: str, command: bool
) -> None:
    """As a kill in the removal left it, file by file, before that was one rename."""
    folder, before, journals = whole(tmp_path)
    (folder / "journal").mkdir(0o700)
    (journals / "session.json").rename(journals / "closed.json")
    (journals / "collector.lock").touch()
    if left != "nothing":
        shutil.copy(journals / left, folder / "journal")
    if command:
        result = invoke("finalize", folder)
        assert (result.returncode, result.stderr) == (0, "")
    else:
        collector.finalize(folder)
    assert contents(folder) == before
    assert not (folder / "journal").exists()


def test_a_journal_folder_without_a_journal_changes_no_table(tmp_path: Path) -> None:
    """Not even where metadata.json does not say that the tables are complete."""
    folder, before, journals = whole(tmp_path)
    described = json.loads(before["metadata.json"])
    (folder / "metadata.json").write_text(json.dumps({**described, "complete": False}))
    before = contents(folder)
    (folder / "journal").mkdir(0o700)
    shutil.copy(journals / "session.json", folder / "journal" / "closed.json")
    for _ in range(2):
        with pytest.raises(SessionError, match="journal has no journal in it") as caught:
            collector.finalize(folder)
        assert "\n" not in str(caught.value)
        assert open_session(folder).state == "cut off"
        assert contents(folder) == before
        assert names(folder / "journal") == ["closed.json", "collector.lock"]


def test_tables_that_have_more_than_the_journals_stay(tmp_path: Path) -> None:
    """A table came of more journals than there are: nothing is replaced, and the journals stay."""
    folder = cut_off(tmp_path)
    followed(folder)
    journal = folder / "journal" / "engine0.journal"
    journal.write_bytes(journal.read_bytes()[:-200])
    before = contents(folder)
    assert before[USAGE].count(b"\n") == 6
    result = invoke("finalize", folder)
    assert result.returncode == 2
    assert "stays as it is: its journals have less, " in result.stderr
    assert f"of the 5 rows of {USAGE}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert contents(folder) == before
    assert journal.exists()


def test_a_torn_row_is_no_row(tmp_path: Path) -> None:
    """A killed collector's last row may be cut; it does not count as one that would be lost."""
    folder, before, journals = whole(tmp_path)
    shutil.move(journals, folder / "journal")
    (folder / "metadata.json").unlink()
    (folder / USAGE).write_bytes(before[USAGE] + b"9.0,1")
    # Of this one, the journals have no row at all.
    (folder / "requests.jsonl").write_bytes(b'{"timestamp": 9')
    collector.finalize(folder)
    assert contents(folder) == before


def test_a_session_that_another_is_at_work_in_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has its lock; the processes of the session are gone."""
    folder = cut_off(tmp_path)
    monkeypatch.setattr(completing, "WAIT_SEC", 0.0)
    with Folder.own(folder / "journal") as journals, Lock(journals) as another:
        assert another.acquire()
        assert not collector.complete_if_ended(folder)
        with pytest.raises(SessionError, match="is still being written"):
            collector.finalize(folder)
        with started(folder) as process:
            assert process.wait(PATIENCE_SEC) == collecting.COMPLETE
        assert names(folder) == ["journal"]
    assert collector.complete_if_ended(folder)
    assert metadata(folder)["complete"] is True


@pytest.mark.parametrize("becomes", [".journal-done-abcdef", None])
def test_who_waited_for_another_finds_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str | None
) -> None:
    """Its journals are gone, or about to go."""
    folder, before, journals = whole(tmp_path)
    place = folder / "journal"
    shutil.move(journals, place)
    with Folder.own(place) as opened:
        another = Lock(opened)
        assert another.acquire()

        def end(_: float) -> None:
            if becomes is None:
                shutil.rmtree(place)
            else:
                place.rename(folder / becomes)
            another.__exit__()

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=end)
        monkeypatch.setattr(completing, "time", clock)
        collector.finalize(folder)
    assert contents(folder) == before
    assert names(folder) == sorted(before)


DAMAGE = frame(Kind.EVENTS, b"\xff" * 50)
"""A frame with the right checksum that holds no events."""

CHANGES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
"""Events of Python's audit after which the names in a folder are others."""


def killed_at(change: int, folder: Path) -> bool:
    """Complete the session, and be killed before this change of its names; returns whether there
    were as many."""

    def finish(say: Say) -> None:
        left = change

        def watch(event: str, _: object) -> None:
            nonlocal left
            if event in CHANGES:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        collector.finalize(folder)

    code = Child(finish).end()
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("state", ["not followed", "followed", "never complete"])
def test_a_kill_before_any_change_of_the_names(tmp_path: Path, state: str) -> None:
    """The next one makes the same bytes of what it left; what is not whole is not called complete.

    ``python -m attacks kill_completing`` does it at length.
    """
    engine = EngineJournal(tmp_path / "left")
    for step in range(4):
        engine.allocated(1_000_000 * step, step + 1)
        engine.flush()
    if state == "never complete":
        engine.status(failed={"schedule": "RuntimeError"})
    engine.killed()
    left = engine.folder
    if state == "followed":
        journal = left / "journal" / "engine0.journal"
        undamaged = journal.read_bytes()
        journal.write_bytes(frames_up_to(undamaged, 3))
        followed(left)
        journal.write_bytes(undamaged)
    undisturbed = shutil.copytree(left, tmp_path / "undisturbed" / left.name)
    collector.finalize(undisturbed)
    expected = contents(undisturbed)
    folder, changes = tmp_path / left.name, 0
    while killed_at(changes, shutil.copytree(left, folder)):
        if (folder / "metadata.json").exists() and metadata(folder)["complete"]:
            assert contents(folder) == expected, changes
        collector.finalize(folder)
        assert contents(folder) == expected, changes
        assert names(folder) == names(undisturbed), changes
        shutil.rmtree(folder)
        changes += 1
    assert changes > 9
    assert contents(folder) == expected


def test_a_damaged_journal_is_kept(tmp_path: Path) -> None:
    """Under a name that nobody completes at each opening; ``finalize`` tries again from there."""
    folder = cut_off(tmp_path)
    journal = folder / "journal" / "engine0.journal"
    undamaged = journal.read_bytes()
    journal.write_bytes(undamaged + DAMAGE)
    kept = folder / "journal-kept"
    opened = open_session(folder)
    assert not (folder / "journal").exists()
    assert (kept / journal.name).read_bytes() == undamaged + DAMAGE
    assert metadata(folder)["complete"] is False
    assert opened.state == "cut off"
    assert (opened.note or "").startswith("not all of its journal could be read; journal-kept/")
    before = contents(folder)
    for _ in range(2):
        result = invoke("finalize", folder)
        assert result.returncode == 2
        assert "cannot be completed: not all of its journal could be read" in result.stderr
        assert result.stderr.count("\n") == 1
        assert contents(folder) == before
    # A later release can read all of it.
    (kept / journal.name).write_bytes(undamaged)
    result = invoke("finalize", folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert not kept.exists()
    assert metadata(folder)["complete"] is True
    assert contents(folder)[USAGE].count(b"\n") == 6


def test_a_damaged_journal_replaces_no_tables_that_have_more(tmp_path: Path) -> None:
    """A collector that was killed had read it before it was damaged."""
    folder = cut_off(tmp_path)
    journal = folder / "journal" / "engine0.journal"
    followed(folder)
    before = contents(folder)
    undamaged = journal.read_bytes()
    journal.write_bytes(frames_up_to(undamaged, 3) + DAMAGE)
    result = invoke("finalize", folder)
    assert result.returncode == 2
    assert "stays as it is: its journals have less, " in result.stderr
    assert f"of the 5 rows of {USAGE}" in result.stderr
    assert contents(folder) == before
    assert names(folder / "journal-kept")
    assert "journal-kept/" in (open_session(folder).note or "")


def test_what_killed_processes_left_behind_goes(tmp_path: Path) -> None:
    folder = cut_off(tmp_path)
    dead = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getpid())"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()

    def leave(maker: str) -> None:
        for name in (f".completing-{maker}-abcdef", f".journal-done-{maker}-abcdef"):
            (folder / name / "inside").mkdir(parents=True)
            (folder / name / "inside" / USAGE).touch()
        (folder / f".metadata.json.{maker}.abcdef").touch()
        (folder / f".{USAGE}").touch()

    mine = str(os.getpid())
    # Who holds the lock knows that nobody else is at work.
    leave(mine)
    (folder / ".completing-x1y2z3").mkdir()
    collector.finalize(folder)
    kept = [name for name in names(folder) if name.startswith(".")]
    assert kept == [f".{USAGE}"]
    # Without a journal there is no lock: what a process that lives may use stays.
    for maker in (dead, mine):
        leave(maker)
    result = invoke("finalize", folder)
    assert (result.returncode, result.stderr) == (0, "")
    kept = [name for name in names(folder) if name.startswith(".")]
    assert kept == [f".completing-{mine}-abcdef", f".{USAGE}", f".metadata.json.{mine}.abcdef"]


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A collector, which does not outlive the block."""
    with subprocess.Popen(
        collecting.command(str(folder)), stderr=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("deleted", ["session", "journal"])
def test_a_session_that_is_deleted_while_it_is_followed(tmp_path: Path, deleted: str) -> None:
    """The collector says so in one line and ends; the tables have what came before."""
    engine = EngineJournal(tmp_path, pid=os.getpid(), start="")
    engine.allocated(1_000_000, 1, 2)
    engine.flush()
    folder = engine.folder
    with started(folder) as process:
        give_up = time.monotonic() + PATIENCE_SEC
        while not (folder / "metadata.json").exists():
            assert time.monotonic() < give_up
            time.sleep(0.02)
        shutil.rmtree(folder if deleted == "session" else folder / "journal")
        _, said = process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == collecting.CANNOT_COMPLETE
    assert said == f"{folder}/journal was deleted; the tables have what came before\n"
    assert folder.exists() == (deleted == "journal")
    if deleted == "journal":
        assert metadata(folder)["ended_at"] is None
        assert (folder / USAGE).read_bytes().count(b"\n") == 2
        assert "journal" in (open_session(folder).note or "")


def test_a_session_that_is_moved_while_it_is_followed(tmp_path: Path) -> None:
    """The tables go on where it is."""
    engine = EngineJournal(tmp_path, pid=os.getpid(), start="")
    engine.allocated(1_000_000, 1, 2)
    engine.flush()
    moved = tmp_path / "moved"
    with Folder.own(engine.folder) as session, session.folder("journal") as journals:
        thread = threading.Thread(target=follow, args=(session, journals))
        thread.start()
        engine.folder.rename(moved)
        engine.allocated(2_000_000, 3)
        engine.recorder.close()
        thread.join(PATIENCE_SEC)
    assert metadata(moved)["complete"] is True
    assert (moved / USAGE).read_bytes().count(b"\n") == 3
    assert not (moved / "journal").exists()
