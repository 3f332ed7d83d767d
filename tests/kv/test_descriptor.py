# SPDX-License-Identifier: Apache-2.0
"""What the application, or somebody at a shell, does to the journal's descriptor and file."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilemate.format.journal import Kind
from profilemate.record.journal_writer import HIGH_FD
from profilemate.record.recorder import Recorder
from tests.kv.children import Child, Say, said
from tests.kv.recording import hooks_only, make_tables, only_session, wait_until_written
from tests.kv.test_writer import JournalAt, contents, journal, keep_step
from tests.kv.transcript import arrivals, transcript
from tests.support.scheduler import build_scheduler

__all__ = ["journal"]

BLOCKS = 60


def descriptor_of(path: Path) -> int:
    """The number under which this process has the file open."""
    (number,) = [
        int(link.name) for link in Path("/proc/self/fd").iterdir() if link.resolve() == path
    ]
    return number


def reopen(opened: Recorder, path: Path) -> Recorder:
    """The same journal, as it is opened in earnest: with its path."""
    opened._output._file._path = path
    return opened


def test_the_number_is_out_of_the_way(journal: JournalAt) -> None:
    """So that no file of the application's soon gets it, and no child has it."""
    number = descriptor_of(journal[1])
    assert number >= HIGH_FD
    assert not os.get_inheritable(number)


def test_a_closed_number_is_the_applications(journal: JournalAt, tmp_path: Path) -> None:
    """It gets the number for a file of its own, and profilemate neither writes there, cuts it,
    nor closes it. The journal is opened again, and nothing is lost."""
    opened, path = reopen(*journal), journal[1]
    keep_step(opened, 1)
    wait_until_written()
    number = descriptor_of(path)
    with (tmp_path / "mine").open("wb", buffering=0) as mine:
        mine.write(b"mine")
        os.dup2(mine.fileno(), number)
        with said() as lines:
            keep_step(opened, 2)
            wait_until_written()
            opened.close()
        os.write(number, b", too")
        os.close(number)
    assert (tmp_path / "mine").read_bytes() == b"mine, too"
    assert contents(path) == ([1, 2], [Kind.HEADER, Kind.EVENTS, Kind.EVENTS, Kind.END])
    assert lines == []


@pytest.mark.parametrize("left", ["nothing", "another", "link"])
def test_a_closed_journal_that_is_no_longer_there(
    journal: JournalAt, tmp_path: Path, left: str
) -> None:
    """Nothing else is written to in its place, nor closed: one line, and recording stops."""
    opened, path = reopen(*journal), journal[1]
    keep_step(opened, 1)
    wait_until_written()
    kept = tmp_path / "kept"
    path.rename(kept)
    if left == "another":
        path.write_bytes(b"")
    elif left == "link":
        path.symlink_to(kept)
    number = descriptor_of(kept)
    with (tmp_path / "mine").open("wb", buffering=0) as mine, said() as lines:
        os.dup2(mine.fileno(), number)
        keep_step(opened, 2)
        wait_until_written()
        opened.close()
        os.close(number)
    assert (tmp_path / "mine").read_bytes() == b""
    assert contents(kept)[0] == [1]
    assert left != "another" or path.read_bytes() == b""
    (line,) = lines
    assert "recording stopped, the journal cannot be written (the application closed it" in line
    assert opened.dropped == 1


def test_a_journal_that_is_cut_short(journal: JournalAt) -> None:
    """What was in it is gone, and what would follow could not be read."""
    opened, path = journal
    keep_step(opened, 1)
    wait_until_written()
    path.write_bytes(b"")
    with said() as lines:
        keep_step(opened, 2)
        wait_until_written()
        opened.close()
    (line,) = lines
    assert "(something has cut it short)" in line


def closing_its_files(session: Path) -> None:
    """All but the pipe to the test."""
    for link in list(Path("/proc/self/fd").iterdir()):
        if int(link.name) > 2 and link.exists() and stat.S_ISREG(link.stat().st_mode):
            os.close(int(link.name))


def deleting_the_journal(session: Path) -> None:
    for path in (session / "journal").glob("*.journal"):
        path.unlink()


def deleting_the_session(session: Path) -> None:
    shutil.rmtree(session)


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (closing_its_files, None),
        (deleting_the_journal, "it has been deleted"),
        (deleting_the_session, "it has been deleted"),
    ],
)
def test_an_engine_in_whose_midst(
    model: Path,
    hooks_on: None,
    tmp_path: Path,
    do: Callable[[Path], None],
    reason: str | None,
) -> None:
    """vLLM does the same as ever."""

    def run(scheduler: Any, midst: Callable[[], None]) -> list[Any]:
        requests = arrivals(40)
        begun = transcript(scheduler, requests[:10])
        midst()
        return begun + transcript(scheduler, [(0, request) for _, request in requests[10:]])

    def engine(say: Say) -> None:
        def midst() -> None:
            wait_until_written()
            do(only_session(tmp_path))

        with said() as lines, hooks_only(tmp_path):
            results = run(build_scheduler(model, BLOCKS), midst)
        say([results, lines])

    child = Child(engine)
    results, lines = child.next()
    assert child.end() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PROFILING", "0")
        expected = run(build_scheduler(model, BLOCKS), lambda: None)
    assert results == json.loads(json.dumps(expected))
    if reason is None:
        assert lines == []
        tables = make_tables(only_session(tmp_path), tmp_path / "tables")
        assert tables.metadata["complete"]
        assert len(tables.requests()) == 40
    else:
        (line,) = lines
        assert line == (
            "profilemate: engine 0: recording stopped, the journal cannot be written "
            f"({reason}); vLLM goes on"
        )
