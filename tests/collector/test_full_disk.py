# SPDX-License-Identifier: Apache-2.0
"""A disk that is full for a while, at any stage of a collector's work: nothing is lost or twice."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from profilemate.collector import follow, journal_reader, producer, rotation
from profilemate.commands.snapshot_folder import take
from profilemate.format import processes
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder
from profilemate.format.keep import ALL
from tests.kv.test_segments import Recording, check_indexes, recording, whole
from tests.support.small_disk import mounted

__all__ = ["recording"]

DISK = "4m"
ROUNDS = 60
"""Looks of the collector at its journals, until their process has ended."""

Before = Callable[[int], None]
"""Is called before each round, with its number."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", DISK) as disk:
        yield disk


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that takes little at a time, cuts often and does not wait."""
    make_eager(monkeypatch)


def make_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    read = journal_reader.JournalReader.read
    monkeypatch.setattr(read, "__kwdefaults__", {"ended": False})
    monkeypatch.setattr(read, "__defaults__", (1_000,))
    monkeypatch.setattr(producer, "HEADER_SEC", 0.0)
    monkeypatch.setattr(rotation, "JOURNAL_BYTES", 8_000)
    monkeypatch.setattr(rotation, "RETRY_SEC", 0.0)
    for name in ("POLL_SEC", "METADATA_SEC", "TOTALS_SEC", "FULL_SEC"):
        monkeypatch.setattr(follow, name, 0.0, raising=False)
    # A disk or a processor that is busy would take minutes, and is not what is tried here.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(follow, "gently", lambda work: work())
    # The recording's clock is its own.
    monkeypatch.setattr(follow, "MERGE_NS", -(1 << 62))
    monkeypatch.setattr(follow, "read_keep", lambda text: ALL)


def collect(session: Path, before: Before) -> None:
    """Follow the session to its end."""
    rounds = 0
    failed_alive = [False]
    once = follow._Work._once

    def counted(work: Any) -> None:
        nonlocal rounds
        rounds += 1
        before(rounds)
        try:
            once(work)
        except OSError:
            failed_alive.append(work.follower.alive)
            raise
        work.follower.segments.finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow._Work, "_once", counted)
        patch.setattr(processes, "is_alive", lambda pid, start: rounds < ROUNDS)
        with Folder.own(session) as folder, folder.folder("journal") as journals:
            try:
                follow.follow(folder, journals)
            except OSError:
                assert not failed_alive[-1]
                raise


def check(session: Path, recording: Recording) -> None:
    """All is there, once, and nothing else."""
    assert whole(session) == recording.tables
    check_indexes(session)
    metadata = json.loads((session / "metadata.json").read_bytes())
    assert metadata["complete"]
    assert metadata["segments"] > 3
    assert [each["mismatches"] for each in metadata["processes"]] == [0, 0]
    assert not (session / "journal").exists()
    left = [path.name for path in session.rglob(".*")]
    assert [name for name in left if not name.startswith(".journal-done-")] == []
    assert not list(session.rglob("checkpoint*"))


@contextmanager
def filled(disk: Path, room: int) -> Iterator[None]:
    """The disk has room for so many more KiB."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        file.truncate(max(0, file.tell() - 1024 * room))
    yield
    filler.unlink()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("room", [0, 4, 12, 28, 60, 150])
@pytest.mark.parametrize("since", [1, 2, 7, 13, 20])
def test_a_disk_that_is_full_for_a_while(
    recording: Recording, disk: Path, since: int, room: int
) -> None:
    session = disk / "session"
    shutil.copytree(recording.session, session)
    full = filled(disk, room)

    def before(number: int) -> None:
        if number == since:
            full.__enter__()
        if number == 50:
            full.__exit__(None, None, None)

    collect(session, before)
    check(session, recording)


@pytest.mark.usefixtures("eager")
def test_the_log_lies_on_the_full_disk(
    recording: Recording, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector cannot say so, and waits for room all the same."""
    session = disk / "session"
    shutil.copytree(recording.session, session)
    full = filled(disk, 0)
    monkeypatch.setattr(sys, "stderr", open("/dev/full", "w", buffering=1))  # noqa: SIM115

    def before(number: int) -> None:
        if number == 7:
            full.__enter__()
        if number == 50:
            full.__exit__(None, None, None)

    collect(session, before)
    check(session, recording)


@contextmanager
def failing(at: int, calls: list[str]) -> Iterator[None]:
    """The call with this number, of those that change a folder or write to a table, finds the disk
    full. ``calls`` gets what each is called with."""

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                calls.append(f"{name} {args[0]}")
                if len(calls) == at:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args, **kwargs)

        return instead

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "write", "open"):
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield


def collected(recording: Recording, session: Path, at: int) -> list[str]:
    """Have a copy of the recording collected, where one call fails; returns the calls."""
    calls: list[str] = []
    shutil.copytree(recording.session, session)
    with failing(at, calls):
        try:
            collect(session, lambda number: None)
        except OSError:
            # When nothing more comes, the collector ends. Another one begins.
            collect(session, lambda number: None)
    check(session, recording)
    return calls


@pytest.fixture(scope="module")
def of_one_segment(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> range:
    """The calls from one cut to the next."""
    with pytest.MonkeyPatch.context() as patch:
        make_eager(patch)
        calls = collected(recording, tmp_path_factory.mktemp("without") / "session", 0)
    return range(*(1 + calls.index(f"mkdir .closing-000{number}") for number in (2, 3)))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("part", range(4))
def test_each_operation_that_fails_once(
    recording: Recording, of_one_segment: range, tmp_path: Path, part: int
) -> None:
    """The collector goes on."""
    assert len(of_one_segment) > 40
    for at in of_one_segment[part::4]:
        collected(recording, tmp_path / str(at) / "session", at)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("at", [*range(1, 12), *range(-40, 0, 3)])
def test_an_operation_that_fails_at_the_start_or_the_end(
    recording: Recording, tmp_path: Path, at: int
) -> None:
    if at < 0:
        at += len(collected(recording, tmp_path / "without" / "session", 0))
    collected(recording, tmp_path / "session", at)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("room", [0, 4, 8, 20])
def test_a_snapshot_on_a_full_disk(recording: Recording, disk: Path, room: int) -> None:
    session = disk / "session"
    shutil.copytree(recording.session, session)
    collect(session, lambda number: None)
    before = sorted(path.name for path in disk.iterdir())
    with filled(disk, room), pytest.raises(SessionError, match="No space left on device"):
        take(session, datetime.now(timezone.utc), last_sec=None, target=None)
    assert sorted(path.name for path in disk.iterdir()) == before
    assert whole(session) == recording.tables
