# SPDX-License-Identifier: Apache-2.0
"""A collector closes segments and removes old ones, while others read the session."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from analysis import Session, open_session
from analysis.tables import completing, files
from tests.analysis.builder import SessionBuilder
from tests.support import segments

USAGE = "kv_cache_usage.csv"
STEPS = "scheduler_steps.csv"
KEPT = 3


@pytest.fixture
def running(session: SessionBuilder, monkeypatch: pytest.MonkeyPatch) -> SessionBuilder:
    """A session whose collector would say that it runs."""
    session.metadata(complete=False, ended_at=None)
    (session.folder / "journal").mkdir()
    monkeypatch.setattr(completing, "complete", lambda _: ("running", "it runs"))
    return session


class Collector(threading.Thread):
    """Writes rows with rising numbers to two tables, cuts segments, and keeps the last few."""

    def __init__(self, session: SessionBuilder) -> None:
        super().__init__()
        self.session = session
        self.written = 0
        self.cuts = 0
        self.is_to_end = threading.Event()

    def run(self) -> None:
        while not self.is_to_end.is_set():
            self.write(4)
            self.begin_to_close()
            self.write(3)
            self.close()
            self.remove()

    def write(self, rows: int) -> None:
        """Write so many rows to each table."""
        for _ in range(rows):
            self.written += 1
            time = f"{self.written}.000000"
            self.session.usage((time, 10))  # type: ignore[arg-type]
            self.session.rows(STEPS, {"timestamp_sec": time, "step": self.written})

    def begin_to_close(self) -> None:
        """Put the files into a folder of their own, one by one."""
        self.cuts += 1
        self.begin_sec = self.written
        folder = self.closing()
        folder.mkdir(parents=True)
        for file in (USAGE, STEPS):
            os.rename(self.session.folder / file, folder / file)

    def close(self) -> None:
        """Pack them in a folder that takes its place at once."""
        base, number = self.session.folder, self.cuts
        lines = {
            file: (self.closing() / file).read_bytes().splitlines(keepends=True)
            for file in (USAGE, STEPS)
        }
        scratch = base / "scratch"
        target = segments.write(
            scratch,
            number,
            float(lines[USAGE][1].split(b",")[0]),
            self.begin_sec,
            {file: rows for file, (_, *rows) in lines.items()},
            {file: header for file, (header, *_) in lines.items()},
        )
        new = base / "segments" / f".new-{number:04d}"
        os.rename(target, new)
        shutil.rmtree(scratch)
        os.rename(new, base / "segments" / f"{number:04d}")
        shutil.rmtree(self.closing())

    def remove(self) -> None:
        """Remove the oldest segment beyond those that are kept."""
        old = self.session.folder / "segments" / f"{self.cuts - KEPT:04d}"
        if self.cuts > KEPT:
            gone = old.with_name(f".gone-{old.name}")
            os.rename(old, gone)
            shutil.rmtree(gone)

    def closing(self) -> Path:
        return self.session.folder / "segments" / f".closing-{self.cuts:04d}"


def numbers(opened: Session, table: str) -> list[int]:
    """The numbers of all rows of a table."""
    batches = opened.batches(table, ["timestamp_sec"], history=True)
    return [int(time) for batch in batches for time in batch["timestamp_sec"]]


def test_each_row_is_read_once(running: SessionBuilder) -> None:
    collector = Collector(running)
    collector.write(1)
    collector.start()
    try:
        removed = 0
        for _ in range(60):
            before = collector.written - 1
            opened = open_session(running.folder)
            cuts = collector.cuts
            for table in ("kv_cache_usage", "scheduler_steps"):
                found = numbers(opened, table)
                assert found == [*range(found[0], found[-1] + 1)]
                assert found[-1] >= before
            first = found[0]
            # The same rows again, though by now segments have been closed, and others removed.
            while collector.cuts < cuts + KEPT + 1:
                assert collector.is_alive()
            assert numbers(opened, "kv_cache_usage")[0] == first
            removed = max(removed, opened.window.removed_segments if opened.window else 0)
        assert removed > 10
    finally:
        collector.is_to_end.set()
        collector.join()


def begins_to_close(collector: Collector) -> None:
    collector.begin_to_close()
    collector.write(1)
    collector.close()


def closes_and_begins_again(collector: Collector) -> None:
    collector.close()
    collector.remove()
    collector.begin_to_close()
    collector.write(2)


@pytest.mark.parametrize("change", [begins_to_close, closes_and_begins_again])
def test_what_changes_between_listing_and_opening(
    running: SessionBuilder,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Collector], None],
) -> None:
    """The worst moments, one after the other: just before each file is opened."""
    collector = Collector(running)
    collector.write(2)
    if change is closes_and_begins_again:
        collector.begin_to_close()
    opened_first = files._descriptor
    for number in range(10):
        collector.write(2)
        left = itertools.count(number, -1)

        def opening(path: Path, *, follow: bool, left: Iterator[int] = left) -> int:
            if next(left) == 0:
                change(collector)
            return opened_first(path, follow=follow)

        monkeypatch.setattr(files, "_descriptor", opening)
        opened = open_session(running.folder)
        for table in ("kv_cache_usage", "scheduler_steps"):
            found = numbers(opened, table)
            assert found == [*range(found[0], found[-1] + 1)]
        assert next(left) < 0, "nothing was changed"


def test_files_are_closed_when_the_session_is_forgotten(running: SessionBuilder) -> None:
    running.usage((1, 10))
    opened = open_session(running.folder)
    before = len(os.listdir("/proc/self/fd"))
    assert opened.scan("kv_cache_usage").collect().height == 1
    del opened
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_where_few_files_may_be_open(
    running: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(running)
    for _ in range(5):
        collector.write(2)
        collector.begin_to_close()
        collector.close()
    monkeypatch.setattr("analysis.tables.segments._MOST_HELD", 3)
    before = len(os.listdir("/proc/self/fd"))
    opened = open_session(running.folder)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    assert numbers(opened, "kv_cache_usage") == [*range(1, 11)]
