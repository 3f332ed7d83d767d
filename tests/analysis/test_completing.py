# SPDX-License-Identifier: Apache-2.0
"""A session that was cut off is completed by the collector, in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from analysis import open_session
from profilemate.format import collecting
from profilemate.format.session import LOCK_FILE
from tests.analysis.journals import ended_session, running_session
from tests.support.small_disk import mounted

ROOT = Path(__file__).parents[2]
PATIENCE_SEC = 60


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def test_the_process_is_gone_afterwards(tmp_path: Path) -> None:
    before = children()
    assert open_session(ended_session(tmp_path)).state == "complete"
    assert children() == before


def test_a_session_that_runs_is_no_other_on_a_full_disk(tmp_path: Path) -> None:
    """Its collector is dead, and there is no room for one table."""
    with mounted(tmp_path / "disk", "64k") as disk:
        folder = running_session(disk)
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        before = {*folder.rglob("*")}
        opened = open_session(folder)
        assert opened.state == "running"
        assert opened.note == (
            "what follows goes up to its last finished line: no collector is at work, and the disk "
            "is full (No space left on device)"
        )
        assert {*folder.rglob("*")} - before <= {folder / "journal" / LOCK_FILE}
        (disk / "filler").unlink()
        assert open_session(folder).note == "what follows goes up to its last finished line"


def test_one_that_has_ended_is_cut_off_on_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        folder = ended_session(disk)
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        opened = open_session(folder)
        assert opened.state == "cut off"
        assert "No space left on device" in str(opened.note)


@pytest.mark.parametrize("found_by", ["the working directory", "a copy elsewhere"])
def test_it_is_the_collector_of_the_analyzer_that_asks(tmp_path: Path, found_by: str) -> None:
    """Wherever the process is by then, and whatever lies there under the name of a module."""
    root = ROOT
    if found_by == "a copy elsewhere":
        root = tmp_path / "copy"
        for package in ("analysis", "profilemate"):
            shutil.copytree(ROOT / package, root / package)
        engine = root / "profilemate" / "collector" / "totals.py"
        engine.write_text(engine.read_text().replace("KV Cache Statistics", "Of the copy"))
    trap = tmp_path / "trap"
    (trap / "profilemate").mkdir(parents=True)
    for name in ("runpy.py", "profilemate/__init__.py"):
        (trap / name).write_text("raise SystemExit('in the trap')")
    folder = ended_session(tmp_path / "sessions")
    code = (
        "import os, sys; from analysis import open_session; "
        "os.chdir(sys.argv[1]); print(open_session(sys.argv[2]).state)"
    )
    command = [sys.executable, "-c", code, str(trap), str(folder)]
    environment = {**os.environ, "PYTHONPATH": ""}
    ended = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("complete\n", "")
    summary = (folder / "kv_cache_summary.txt").read_text()
    assert summary.startswith("Of the copy" if root != ROOT else "KV Cache Statistics")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = ended_session(tmp_path)
    lock = folder / "journal" / "collector.lock"
    lock.mkdir()
    opened = open_session(folder)
    assert opened.state == "cut off"
    assert opened.note == (
        f"its tables could not be completed: cannot complete {folder}: Is a directory: {lock}"
    )


def test_without_a_collector_the_session_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "MODULE", "profilemate.elsewhere")
    opened = open_session(ended_session(tmp_path))
    assert opened.state == "cut off"
    assert opened.note == "profilemate's collector is not there to complete it"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the collector was ended by SIGKILL"),
        ("import os; os._exit(7)", "the collector ended with exit code 7"),
        ("raise MemoryError('none left')", "MemoryError: none left"),
    ],
)
def test_a_collector_that_fails_leaves_the_session_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    monkeypatch.setattr(collecting, "command", lambda *_: [sys.executable, "-c", program])
    opened = open_session(ended_session(tmp_path))
    assert opened.state == "cut off"
    assert opened.note == f"its tables could not be completed: {says}"


def test_no_python_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ended_session(tmp_path)
    monkeypatch.setattr(sys, "executable", "")
    opened = open_session(folder)
    assert opened.state == "cut off"
    assert (opened.note or "").startswith("its tables could not be completed: [Errno")


def endless_session(base: Path) -> Path:
    """An ended session with a journal whose reader waits for ever."""
    folder = ended_session(base)
    os.mkfifo(folder / "journal" / "engine1.journal")
    return folder


def wait_until_begun(folder: Path) -> None:
    """Wait until the tables are being made."""
    give_up = time.monotonic() + PATIENCE_SEC
    while not list(folder.glob(".completing-*")):
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_an_interrupt_is_quiet_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    """Ctrl-C goes to all that the terminal runs: here, to the group that the analyzer leads."""
    # As on a terminal: what a shell runs in the background is deaf to it, with all its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = endless_session(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "analysis", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            wait_until_begun(folder)
            os.killpg(process.pid, signal.SIGINT)
            assert process.communicate(timeout=PATIENCE_SEC) == ("", "")
        finally:
            process.kill()
    assert process.returncode == 130
    assert [path.name for path in folder.iterdir()] == ["journal"]


def test_a_collector_that_is_asked_to_end_removes_what_it_began(tmp_path: Path) -> None:
    folder = endless_session(tmp_path)
    with subprocess.Popen(collecting.command("--complete", str(folder))) as process:
        try:
            wait_until_begun(folder)
            process.terminate()
            assert process.wait(PATIENCE_SEC) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert [path.name for path in folder.iterdir()] == ["journal"]


def test_its_exit_code_says_what_the_session_is(tmp_path: Path) -> None:
    def ended(folder: Path) -> tuple[int, bytes]:
        command = collecting.command("--complete", str(folder))
        process = subprocess.run(command, capture_output=True, check=False)
        return process.returncode, process.stdout + process.stderr

    assert ended(running_session(tmp_path / "a")) == (collecting.RUNNING, b"")
    folder = ended_session(tmp_path / "b")
    assert ended(folder) == (collecting.COMPLETE, b"")
    assert ended(folder) == (collecting.COMPLETE, b"")
    damaged = ended_session(tmp_path / "c")
    (damaged / "journal" / "session.json").write_text("{")
    code, said = ended(damaged)
    assert code == collecting.CANNOT_COMPLETE
    assert said.startswith(f"{damaged}/journal/session.json cannot be read: ".encode())
    assert said.count(b"\n") == 1
