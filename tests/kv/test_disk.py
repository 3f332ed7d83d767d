# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, read-only, or out of descriptors, for the journal and for the tables."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from profilemate import collector
from profilemate.collector.__main__ import main as collect
from profilemate.format.collecting import CANNOT_COMPLETE
from profilemate.hooks.kv import watch
from tests.kv.children import Child, Say, said
from tests.kv.recording import (
    Clock,
    Tables,
    found,
    hooks_only,
    journal_of,
    make_tables,
    only_session,
    wait_until_written,
)
from tests.kv.test_recorder import events_in, frames_of, json_values
from tests.kv.transcript import arrivals, transcript
from tests.support.scheduler import build_scheduler
from tests.support.small_disk import mounted

pytestmark = pytest.mark.usefixtures("hooks_on")

BLOCKS = 60
LAST_FRAME = 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 KiB."""
    with mounted(tmp_path / "disk", "32k") as disk:
        yield disk


def unprofiled(model: Path, count: int = 40) -> list[Any]:
    """What vLLM does when nothing is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PROFILING", "0")
        return transcript(build_scheduler(model, BLOCKS), arrivals(count))


def test_a_full_disk(model: Path, small_disk: Path, tmp_path: Path) -> None:
    """What was written stays readable, what is missing is counted, and recording stays off, as the
    line says, when there is room again."""
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 12_000)
    with said() as lines, hooks_only(small_disk, thread=False):
        scheduler = build_scheduler(model, BLOCKS)
        results = transcript(scheduler, arrivals(400))
        filler.unlink()
        transcript(scheduler, arrivals(3))
    (line,) = lines
    assert line == (
        "profilemate: engine 0: recording stopped, the journal cannot be written "
        "(No space left on device); vLLM goes on"
    )
    assert results == unprofiled(model, 400)
    session = only_session(small_disk)
    written = journal_of(session).read_bytes()
    assert frames_of(written)[-1][0] == LAST_FRAME
    metadata = make_tables(session, tmp_path / "tables").metadata
    assert not metadata["complete"]
    assert metadata["dropped_events"] > events_in(written) > 0
    assert metadata["processes"][0]["ended"] == "exit"


def test_tables_on_a_full_disk(model: Path, small_disk: Path, tmp_path: Path) -> None:
    """The collector ends, and the journal stays: with room, nothing is missing."""
    with hooks_only(tmp_path / "sessions"):
        transcript(build_scheduler(model, BLOCKS), arrivals(20))
    elsewhere = only_session(tmp_path / "sessions")
    expected = make_tables(elsewhere, tmp_path / "expected").bytes_of()
    session = small_disk / elsewhere.name
    subprocess.run(["cp", "-a", str(elsewhere), str(session)], check=True)
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    child = Child(lambda say: say(collect([str(session)])))
    assert list(child.rest()) == [CANNOT_COMPLETE]
    assert child.end() == 0
    assert (session / "journal").is_dir()
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    collector.finalize(session)
    assert Tables(session).bytes_of() == expected
    assert Tables(session).metadata["complete"]


def test_a_read_only_disk(model: Path, small_disk: Path) -> None:
    """One line that says what to do, and no session."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with said() as lines, hooks_only(small_disk / "sessions"):
        results = transcript(build_scheduler(model, BLOCKS), arrivals())
    (line,) = lines
    assert "Read-only file system (set VLLM_PROFILING_DIR to a folder of yours)" in line
    assert results == unprofiled(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_no_more_descriptors(model: Path, tmp_path: Path, when: str) -> None:
    """The application has used up all that it may have, as a server with many clients does."""

    def engine(say: Say) -> None:
        def use_up() -> None:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
            with suppress(OSError):
                while True:
                    os.dup(2)

        clock = Clock()
        name = found(tmp_path, clock)
        open_journal = watch.open_journal

        def open_none(*arguments: Any) -> Any:
            use_up()
            return open_journal(*arguments)

        with (
            pytest.MonkeyPatch.context() as patch,
            said() as lines,
            hooks_only(tmp_path, clock, name=name),
        ):
            if when == "before":
                patch.setattr(watch, "open_journal", open_none)
            scheduler = build_scheduler(model, BLOCKS)
            if when == "after":
                use_up()
            results = transcript(scheduler, arrivals())
            wait_until_written()
        say([results, lines])

    child = Child(engine)
    results, lines = child.next()
    assert child.end() == 0
    assert results == json_values(unprofiled(model))
    if when == "before":
        (line,) = lines
        assert "Too many open files" in line
    else:
        assert lines == []
        metadata = make_tables(only_session(tmp_path), tmp_path / "tables").metadata
        assert metadata["complete"]
