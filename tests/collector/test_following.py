# SPDX-License-Identifier: Apache-2.0
"""Workers' journals make the same tables however they are read, and wherever they end."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilemate import collector
from profilemate.collector.follower import Follower
from profilemate.format.journal import MAGIC
from tests.collector.journals import (
    CAPTURES,
    MEMORY,
    TIMELINE,
    USAGE,
    Batch,
    EngineJournal,
    WorkerJournal,
    bytes_of,
    lines,
    make_tables,
    metadata,
)

SIZES = (1, 2, 4, 8)


def write_story(worker: WorkerJournal, executions: int) -> None:
    """Start-up, then executions of all kinds, in frames of one to five."""
    chance = random.Random(worker.path.name)
    now = 1_000
    for number, size in enumerate(SIZES, 1):
        worker.graph(now, number, ("PIECEWISE", size, None, 0, 0))
        for _ in range(3):
            worker.captured(now, now + 50, number, kib=size)
            now += 100
        worker.flush()
    for number, size in enumerate((*SIZES, 100), 1):
        mode = "PIECEWISE" if size in SIZES else "NONE"
        batch: Batch = (mode, size, None, 0, 0)
        worker.batch(now, number, batch)
    for _ in range(executions):
        now += chance.randrange(1, 900)
        number = chance.randrange(1, len(SIZES) + 2)
        if number > len(SIZES):
            worker.executed(now, number, tokens=100, dummy=chance.randrange(2))
        else:
            took = chance.randrange(1_000, 90_000)
            worker.executed(now, number, SIZES[number - 1], number, 3, took)
        if chance.random() < 0.3:
            worker.replayed(now + 1, 0, graphs=1, launch_ns=1_000)
        if chance.random() < 0.4:
            worker.flush()


@dataclass(frozen=True)
class Recording:
    """A session as its two workers left it, and its tables."""

    session: Path
    journal: bytes
    tables: dict[str, bytes]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("recording")
    workers = [WorkerJournal(folder, rank) for rank in (0, 1)]
    for worker in workers:
        write_story(worker, 150)
        worker.killed()
    session = workers[0].folder
    tables = bytes_of(make_tables(session, folder / "tables"))
    assert set(tables) == {CAPTURES, USAGE, TIMELINE}
    assert all(len(content) > 400 for content in tables.values())
    return Recording(session, workers[0].path.read_bytes(), tables)


@contextmanager
def session_with(recording: Recording, journal: bytes) -> Iterator[Path]:
    """The recorded session with another journal of its first worker."""
    with tempfile.TemporaryDirectory() as folder:
        session = Path(folder) / "session"
        shutil.copytree(recording.session, session)
        (session / "journal" / "worker0.journal").write_bytes(journal)
        yield session


def follow(session: Path, target: Path) -> Follower:
    """Read and apply all that there is."""
    target.mkdir(exist_ok=True)
    follower = Follower(session, target)
    follower.discover()
    while follower.read():
        follower.apply()
    follower.tables.flush()
    return follower


@settings(max_examples=30)
@given(data=st.data())
def test_any_chunks_make_the_same_rows(recording: Recording, data: st.DataObject) -> None:
    """Those of one worker; how two take turns depends on when each is read."""
    size = len(recording.journal)
    cuts = data.draw(st.lists(st.integers(0, size), max_size=20).map(sorted))
    with session_with(recording, b"") as session:
        journals = session / "journal"
        (journals / "worker1.journal").unlink()
        whole = session.with_name("whole")
        shutil.copytree(session, whole)
        (whole / "journal" / "worker0.journal").write_bytes(recording.journal)
        target = session / "tables"
        target.mkdir()
        follower = Follower(session, target)
        for begin, end in zip([0, *cuts], [*cuts, size], strict=True):
            with (journals / "worker0.journal").open("ab") as file:
                file.write(recording.journal[begin:end])
            follower.discover()
            follower.read()
            follower.apply()
            follower.write(ended=False)
        follower.close()
        assert bytes_of(target) == bytes_of(make_tables(whole, session / "expected"))


@settings(max_examples=60)
@given(data=st.data())
def test_worker_killed(recording: Recording, data: st.DataObject) -> None:
    """Its last frame is torn: what was followed and what is finalized are the same bytes, and the
    rows are those that the whole journal begins with."""
    cut = data.draw(st.integers(0, len(recording.journal)))
    with session_with(recording, recording.journal[:cut]) as session:
        check_prefix(session, recording)


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_journal(recording: Recording, data: st.DataObject) -> None:
    """One bit has changed on the disk: it is a problem of this worker, and costs the events that it
    is in, and what they described."""
    at = data.draw(st.integers(len(MAGIC), len(recording.journal) - 1))
    damaged = bytearray(recording.journal)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    with session_with(recording, bytes(damaged)) as session:
        follow(session, session / "tables").close()
        found = metadata(session / "tables")
        timeline = lines(session / "tables", TIMELINE)
    assert [bool(process["problem"]) for process in found["processes"]] == [True, False]
    assert not found["complete"]
    whole = {line.split(",")[0]: line for line in of_first_worker(recording.tables[TIMELINE])}
    for line in [line for line in timeline if line.split(",")[-2] == "0"]:
        time, *cells = line.split(",")
        assert whole[time] == line or not any(cells[:5])


def check_prefix(session: Path, recording: Recording) -> None:
    followed = session.with_name("followed")
    follower = follow(session, followed)
    follower.close()
    for table in (CAPTURES, TIMELINE):
        whole = of_first_worker(recording.tables[table])
        part = of_first_worker(bytes_of(followed).get(table, b""))
        # The last entry may have got more graphs than its row says.
        closed = part[:-1] if table == CAPTURES else part
        assert whole[: len(closed)] == closed
    if not follower.producers["worker0"].header:
        # A journal without its header may be of a process that is about to begin.
        return
    finalized = session.with_name("finalized")
    shutil.copytree(session, finalized)
    collector.finalize(finalized)
    assert bytes_of(finalized) == bytes_of(followed)
    (first, second) = metadata(finalized)["processes"]
    assert (first["role"], first["rank"], first["ended"]) == ("worker", 0, "killed")
    assert first["problem"] is second["problem"] is None


def of_first_worker(table: bytes) -> list[str]:
    """The rows of worker 0: the last column but one says whose a row is in both tables."""
    return [line for line in table.decode().splitlines()[1:] if line.split(",")[-2] == "0"]


def test_collector_killed(recording: Recording) -> None:
    """What it wrote is made anew; its samples, which no journal has, stay, but for a torn one."""
    with session_with(recording, recording.journal[: len(recording.journal) // 2]) as session:
        follower = follow(session, session)
        follower.write(ended=False)
        timeline = session / TIMELINE
        timeline.write_bytes(timeline.read_bytes()[:-7])
        header = "timestamp_sec,gpu,used_bytes,free_bytes,utilization_pct\n"
        samples = "1.000000,0,10,90,5\n2.000000,0,20,80,6\n"
        (session / MEMORY).write_text(f"{header}{samples}3.000000,0,3")
        (session / "journal" / "worker0.journal").write_bytes(recording.journal)
        collector.finalize(session)
        assert (session / MEMORY).read_text() == header + samples
        (session / MEMORY).unlink()
        assert bytes_of(session) == recording.tables


def test_samples_without_a_row_go(recording: Recording) -> None:
    with session_with(recording, recording.journal) as session:
        (session / MEMORY).write_text("timestamp_sec,gpu,us")
        collector.finalize(session)
        assert not (session / MEMORY).exists()


def test_session_whose_processes_end_apart(tmp_path: Path) -> None:
    """A worker that was killed early holds nothing up: rows are written before all is read."""
    early = WorkerJournal(tmp_path, 0)
    early.batch(0, 1, ("NONE", 8, None, 0, 0))
    early.executed(1_000, 1, tokens=8)
    early.killed()
    late = WorkerJournal(tmp_path, 1)
    late.batch(0, 1, ("NONE", 8, None, 0, 0))
    for frame in range(400):
        for number in range(100):
            late.executed(500 + 100 * frame + number, 1, tokens=8)
        late.flush()
    late.killed()
    written = []

    def look(done: int, total: int) -> None:
        (scratch,) = late.folder.glob(".completing-*")
        written.append((done, total, len(lines(scratch, TIMELINE))))

    collector.finalize(late.folder, look)
    (done, total, rows), *others = written
    assert 0 < done < total
    assert others
    # Five frames end before the early worker's one. Only the next reading finds no other.
    assert rows == 501
    assert all(rows > 10_000 for _, _, rows in others)
    timeline = [line.split(",") for line in lines(late.folder, TIMELINE)]
    assert len(timeline) == 40_001
    assert [cells[-2] for cells in timeline].index("0") == 500


def test_processes_that_join_when_the_others_have_ended(tmp_path: Path) -> None:
    """They are followed, too, and the session is open as long as one has just come."""
    first = EngineJournal(tmp_path)
    first.killed()
    (tmp_path / "tables").mkdir()
    follower = Follower(first.folder, tmp_path / "tables")
    follower.discover()
    for rank in (1, 2):
        another = EngineJournal(tmp_path, rank)
        assert another.folder == first.folder
        another.killed()
        assert not follower.retire()
    assert set(follower.producers) == {"engine0", "engine1", "engine2"}
    assert follower.retire()
    late = EngineJournal(tmp_path, 3)
    assert late.folder != first.folder
    late.killed()


def test_engine_and_workers(tmp_path: Path) -> None:
    """A worker leaves the engine's tables as they are without it, and the totals, too."""
    alone = EngineJournal(tmp_path / "alone", device="cpu")
    both = EngineJournal(tmp_path / "both", device="cuda")
    worker = WorkerJournal(tmp_path / "both", 3)
    for engine in (alone, both):
        engine.allocated(1_000_000, 1, 2)
        engine.allocated(2_000_000, 3)
        engine.killed()
    write_story(worker, 10)
    worker.killed()
    for engine in (alone, both):
        collector.finalize(engine.folder)
    for table in ("kv_cache_usage.csv", "kv_cache_allocations.csv", "scheduler_steps.csv"):
        assert lines(alone.folder, table) == lines(both.folder, table)
    summaries = [(e.folder / "kv_cache_summary.txt").read_text() for e in (alone, both)]
    assert summaries[0] == summaries[1]
    assert "Total allocations: 3\n" in summaries[0]
    found = metadata(both.folder)
    assert found["parallel"]["data"] == 1
    assert [process["role"] for process in found["processes"]] == ["engine", "worker"]
    assert (metadata(alone.folder)["device"], found["device"]) == ("cpu", "cuda")
