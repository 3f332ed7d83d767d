# SPDX-License-Identifier: Apache-2.0
"""A collector beside a process that goes on and on: bounded, and started again where it dies."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from profilemate import collector
from profilemate.format import journal
from profilemate.format.events import Op
from profilemate.format.keep import ALL, Keep
from profilemate.format.session import LOCK_FILE
from profilemate.record import backlog, encode, launch, recorder
from profilemate.record.backlog import Backlog
from profilemate.record.claim import claim
from profilemate.record.recorder import Recorder
from tests.kv.children import processes_with
from tests.kv.test_segments import whole

PATIENCE_SEC = 120
BLOCKS = 300
KEEP = "12MB"
FILE_BYTES = 1 << 16


class Busy:
    """An engine of this process that hands out all of its blocks in each step, to nobody."""

    def __init__(self, sessions: Path, keep: str, of_journals: Keep = ALL) -> None:
        place = claim(sessions, "session_20260131_120000_4711_c0ffee", "engine0", keep)
        self.folder = place.directory
        header = {
            "producer": "engine",
            "rank": 0,
            "pid": os.getpid(),
            "start": "",
            "hooks": [],
            "pools": [{"blocks": BLOCKS + 1, "null": 0}],
            "groups": [{"kind": "FullAttentionSpec", "block_size": 16, "pool": 0}],
            "caching": True,
            "hash_block_size": 16,
            "told_by_content": 16,
        }
        looks_after = Backlog(place.journal, lambda: launch.start(self.folder), of_journals)
        self.recorder = Recorder(place.fd, header, "engine 0", 0.01, place.journal, looks_after)
        self.steps = 0
        self._blocks = [SimpleNamespace(block_id=block) for block in range(1, BLOCKS + 1)]

    def step(self) -> None:
        """Hand out all blocks, with contents of their own, and take them back."""
        self.steps += 1
        keep, now = self.recorder.keep, time.monotonic_ns
        keep((encode.blocks, Op.ALLOCATE, now(), *self._blocks))
        base = self.steps * BLOCKS
        hashes = [(base + number).to_bytes(8, "little") for number in range(BLOCKS)]
        keep((encode.cached_list, Op.CACHE_LIST, now(), (0, 0, 16, 16), self._blocks, hashes))
        keep((encode.freed, Op.FREE, now(), 0, self._blocks, []))
        keep((encode.between, Op.STEP, now(), now(), (1, 0, 16, 16, 1, BLOCKS)))
        self.recorder.step_ended()


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Busy]:
    monkeypatch.setattr(journal, "FILE_BYTES", FILE_BYTES)
    monkeypatch.setattr(backlog, "RESTART_SEC", 0.0)
    engine = Busy(tmp_path, KEEP)
    yield engine
    recorder.close_all()
    kill(engine.folder)


def kill(folder: Path) -> None:
    """Kill the session's collector, and those that are about to find out that there is one."""
    for process in processes_with(str(folder)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def until(is_there: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_SEC
    while not is_there():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def numbers(folder: Path) -> list[int]:
    found = (folder / "segments").glob("[0-9]*")
    return sorted(int(path.name) for path in found)


def blocked_signals(process: int) -> int:
    (line,) = (
        line
        for line in Path("/proc", str(process), "status").read_text().splitlines()
        if line.startswith("SigBlk")
    )
    return int(line.split()[1], 16)


def size_of_segments(folder: Path) -> int:
    """Bytes of all closed segments."""
    total = 0
    for number in numbers(folder):
        # It may go this very moment.
        with suppress(FileNotFoundError):
            files = (folder / "segments" / f"{number:04}").iterdir()
            total += sum(path.stat().st_size for path in files)
    return total


def test_a_long_run_is_bounded_and_its_collector_is_started_again(busy: Busy) -> None:
    launch.start(busy.folder)
    most = 0
    killed = 0
    give_up = time.monotonic() + PATIENCE_SEC
    while numbers(busy.folder)[:1] < [6] or killed < 3:
        for _ in range(20):
            busy.step()
        # No faster than a collector is that shares a processor.
        time.sleep(0.2)
        most = max(most, size_of_segments(busy.folder))
        if len(numbers(busy.folder)) > killed and killed < 3:
            kill(busy.folder)
            killed += 1
        assert time.monotonic() < give_up
    assert [blocked_signals(each) for each in processes_with(str(busy.folder))][:1] == [0]
    busy.recorder.close()
    until(lambda: not (busy.folder / "journal").exists())
    metadata = json.loads((busy.folder / "metadata.json").read_bytes())
    assert metadata["complete"]
    assert metadata["processes"][0]["mismatches"] == 0
    first, *_ = left = numbers(busy.folder)
    assert left == list(range(first, left[-1] + 1))
    assert metadata["window"]["removed_segments"] == first - 1
    # What is kept, and a segment: it appears before the oldest one goes.
    assert most < 12e6 + 2**21
    tables = whole(busy.folder)
    steps = tables["scheduler_steps.csv"].decode().splitlines()
    assert steps[-1].split(",")[1] == str(busy.steps)
    kept = [int(line.split(",")[1]) for line in steps[1:]]
    assert kept == list(range(kept[0], busy.steps + 1))
    evictions = tables["kv_cache_evictions.csv"].count(b"\n") - 1
    assert abs(evictions - len(kept) * BLOCKS) <= BLOCKS
    # Of the whole run, whatever is left of its tables.
    summary = (busy.folder / "kv_cache_summary.txt").read_text()
    assert f"Total allocations: {busy.steps * BLOCKS}\n" in summary
    assert f"Total evictions: {(busy.steps - 1) * BLOCKS}\n" in summary
    assert not list((busy.folder / "segments").rglob("checkpoint*"))


def test_a_killed_collector_is_missed_before_a_journal_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "RESTART_SEC", 0.0)
    engine = Busy(tmp_path, KEEP)
    launch.start(engine.folder)
    until((engine.folder / "totals.json").exists)
    killed = processes_with(engine.folder)
    kill(engine.folder)
    until(lambda: not processes_with(engine.folder))
    (engine.folder / "totals.json").unlink()

    def goes_on() -> bool:
        engine.step()
        return (engine.folder / "totals.json").exists()

    until(goes_on)
    assert set(processes_with(engine.folder)).isdisjoint(killed)
    engine.recorder.close()
    assert [path.name for path in engine.folder.glob("journal/*.journal")] == ["engine0.journal"]
    kill(engine.folder)


@pytest.mark.parametrize("lives", [False, True], ids=["ends at once", "lives"])
def test_a_collector_that_ends_at_once_is_started_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """One that lives for a while is started again after the first pause."""
    now, starts = [100.0], []
    monkeypatch.setattr(backlog.time, "monotonic", lambda: now[0])
    lock = tmp_path / LOCK_FILE
    lock.touch()
    looks_after = Backlog(tmp_path / "engine0.journal", lambda: starts.append(now[0]), ALL)
    while now[0] < 1_500:
        with open(lock, "rb") as holder:
            if lives and starts and now[0] < starts[-1] + 2 * backlog.RESTART_SEC:
                fcntl.flock(holder, fcntl.LOCK_EX)
            assert looks_after.look() == ""
        now[0] += 1.0
    pauses = [later - before for before, later in pairwise(starts)]
    if lives:
        assert set(pauses) == {2 * backlog.RESTART_SEC}
    else:
        assert [round(pause, -1) for pause in pauses] == [10, 20, 40, 80, 160, 320, 320, 320]


def test_little_to_keep_does_not_end_the_recording(tmp_path: Path) -> None:
    """A collector that works leaves the file that is being written, and the one before it."""
    (tmp_path / LOCK_FILE).touch()
    first = tmp_path / "engine0.journal"
    looks_after = Backlog(first, lambda: None, Keep(2e6, None))
    first.touch()
    for number in (2, 3):
        (tmp_path / journal.file_name("engine0", number)).write_bytes(bytes(journal.FILE_BYTES))
    assert looks_after.look() == ""
    for number in (4, 5, 6):
        (tmp_path / journal.file_name("engine0", number)).write_bytes(bytes(journal.FILE_BYTES))
    assert looks_after.look() == "no collector has read its last 10 MiB"


def test_journals_that_nobody_reads_end_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal, "FILE_BYTES", FILE_BYTES)
    monkeypatch.setattr(backlog, "LEAST_BYTES", 0)
    monkeypatch.setattr(launch, "start", lambda directory: None)
    engine = Busy(tmp_path, "", Keep(4e6, None))
    for _ in range(600):
        engine.step()
        engine.recorder.flush()
    engine.recorder.close()
    assert capfd.readouterr().err.count("no collector has read its last 1 MiB") == 1
    sizes = [path.stat().st_size for path in (engine.folder / "journal").glob("*.journal")]
    assert 0.9e6 < sum(sizes) < 1e6 + 2 * FILE_BYTES
    collector.finalize(engine.folder)
    metadata = json.loads((engine.folder / "metadata.json").read_bytes())
    assert not metadata["complete"]
    assert metadata["dropped_events"] > 0
    written = whole(engine.folder)["scheduler_steps.csv"].count(b"\n") - 1
    # Each step has four events.
    assert 4 * written + metadata["dropped_events"] == 4 * engine.steps
