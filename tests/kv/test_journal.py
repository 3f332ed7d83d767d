# SPDX-License-Identifier: Apache-2.0
"""From one journal to the same tables, however it is read, and wherever it ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilemate import collector
from profilemate.collector import producer
from profilemate.collector.follower import Follower
from profilemate.format import processes
from profilemate.format.errors import SessionError
from profilemate.format.journal import MAGIC, Kind, frame
from tests.kv.recording import (
    TABLES,
    Clock,
    Tables,
    copy_of,
    hooks_only,
    journal_of,
    make_tables,
    only_session,
)
from tests.kv.workload import Driver, Setting, busy, scheduler_for
from tests.support.oracle import Oracle

SETTING = Setting(blocks=24, max_num_seqs=5, max_num_batched_tokens=128, policy="priority")


@dataclass(frozen=True)
class Recording:
    """A session as its process left it, and its tables."""

    session: Path
    journal: bytes
    tables: dict[str, bytes]


@pytest.fixture(scope="module")
def recording(model: Path, hooks_on: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The process ended in good order, with its work half done. Each step is a frame."""
    folder = tmp_path_factory.mktemp("recording")
    clock = Clock()
    with Oracle().watching() as oracle, hooks_only(folder, clock, thread=False):
        driver = Driver(scheduler_for(model, SETTING), oracle, clock, SETTING)
        for operation in busy():
            driver.do(operation)
    session = only_session(folder)
    tables = make_tables(session, folder / "tables").bytes_of()
    assert set(tables) == set(TABLES)
    assert len(oracle.evictions) > 100
    assert sum(life.preemptions for life in oracle.lives.values()) > 5
    return Recording(session, journal_of(session).read_bytes(), tables)


@contextmanager
def session_with(recording: Recording, journal: bytes) -> Iterator[Path]:
    """The recorded session with another journal."""
    with tempfile.TemporaryDirectory() as folder:
        yield copy_of(recording.session, Path(folder) / "session", journal)


@contextmanager
def writer_gone() -> Iterator[None]:
    """The process that recorded is this one. As if it were gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "is_alive", lambda pid, start: False)
        patch.setattr(producer, "HEADER_SEC", 0.0)
        yield


@given(data=st.data())
def test_any_chunks_make_the_same_tables(recording: Recording, data: st.DataObject) -> None:
    size = len(recording.journal)
    cuts = data.draw(st.lists(st.integers(0, size), max_size=40).map(sorted))
    with session_with(recording, b"") as session:
        target = session / "tables"
        target.mkdir()
        follower = Follower(session, target)
        for begin, end in zip([0, *cuts], [*cuts, size], strict=True):
            with journal_of(session).open("ab") as file:
                file.write(recording.journal[begin:end])
            follower.discover()
            follower.read()
            follower.apply()
            follower.write(ended=False)
        while follower.read():
            follower.apply()
        follower.close()
        assert Tables(target).bytes_of() == recording.tables


@settings(max_examples=150)
@given(data=st.data())
def test_a_cut_journal_makes_a_prefix(recording: Recording, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(recording.journal)))
    with session_with(recording, recording.journal[:cut]) as session:
        check_prefix(session, recording)


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_bit_is_a_problem(recording: Recording, data: st.DataObject) -> None:
    """What was written before it is there, and what came after it only where that is sound."""
    at = data.draw(st.integers(len(MAGIC), len(recording.journal) - 1))
    damaged = bytearray(recording.journal)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    with writer_gone(), session_with(recording, bytes(damaged)) as session:
        tables = make_tables(session, session / "tables")
        (process,) = tables.metadata["processes"]
        assert process["problem"]
        assert not tables.metadata["complete"]
        found = tables.bytes_of()
    for table in TABLES:
        whole, part = recording.tables[table], found.get(table, b"")
        assert part.count(b"\n") <= whole.count(b"\n")
        # The rows of steps go on; those of lookups that were under way come earlier.
        if table not in ("scheduler_steps.csv", "prefix_cache_lookups.csv"):
            assert whole.startswith(part)


def check_prefix(session: Path, recording: Recording) -> None:
    """Every row that was closed is there byte for byte, and an open one counts what it saw."""
    target = session / "tables"
    target.mkdir()
    follower = Follower(session, target)
    follower.discover()
    while follower.read():
        follower.apply()
    follower.tables.flush()
    closed = Tables(target).bytes_of()
    for table, content in closed.items():
        assert recording.tables[table].startswith(content)
    follower.close()
    ended = Tables(target)
    for table, content in ended.bytes_of().items():
        assert content.startswith(closed.get(table, b""))
    steps = ended.rows("scheduler_steps.csv")
    numbers = [
        number for row in steps for number in range(row["step"], row["step"] + row["repeats"])
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    (process,) = ended.metadata["processes"]
    assert process["problem"] is None
    assert process["mismatches"] == 0


def frames(journal: bytes) -> list[bytes]:
    """The frames of a journal, as they are in it."""
    found, at = [], len(MAGIC)
    while at < len(journal):
        end = at + 12 + int.from_bytes(journal[at : at + 4], "little")
        found.append(journal[at:end])
        at = end
    return found


def test_finalize_makes_the_same_tables(recording: Recording) -> None:
    with session_with(recording, recording.journal) as session:
        collector.finalize(session)
        tables = Tables(session)
        assert tables.bytes_of() == recording.tables
        assert tables.metadata["complete"]
        assert not (session / "journal").exists()
        left = sorted(path.name for path in session.iterdir())
        assert left == sorted([*TABLES, "kv_cache_summary.txt", "metadata.json", "totals.json"])
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in session.iterdir())
        collector.finalize(session)
        assert tables.bytes_of() == recording.tables


def test_finalize_after_a_collector_that_died(recording: Recording) -> None:
    """What it wrote, torn rows included, is made anew."""
    with session_with(recording, recording.journal[: len(recording.journal) // 2]) as session:
        follower = Follower(session, session)
        follower.discover()
        follower.read()
        follower.apply()
        follower.write(ended=False)
        usage = session / "kv_cache_usage.csv"
        usage.write_bytes(usage.read_bytes()[:-7])
        journal_of(session).write_bytes(recording.journal)
        collector.finalize(session)
        assert Tables(session).bytes_of() == recording.tables


def test_a_journal_that_goes_on_is_not_finalized(
    model: Path, hooks_on: None, tmp_path: Path
) -> None:
    with hooks_only(tmp_path):
        scheduler = scheduler_for(model, SETTING)
        session = only_session(tmp_path)
        before = sorted(session.rglob("*"))
        assert not collector.complete_if_ended(session)
        with pytest.raises(SessionError, match="still being written"):
            collector.finalize(session)
        assert sorted(path for path in session.rglob("*") if path.suffix != ".lock") == before
        del scheduler
    collector.finalize(session)
    assert Tables(session).metadata["complete"]


def test_a_journal_with_bytes_before_it(recording: Recording) -> None:
    """All of it can be read all the same."""
    with writer_gone(), session_with(recording, b"PK" + recording.journal) as session:
        tables = make_tables(session, session / "tables")
        assert tables.bytes_of() == recording.tables
        assert not tables.metadata["complete"]


def test_a_session_without_its_founding_is_named(recording: Recording) -> None:
    with session_with(recording, recording.journal) as session:
        (session / "journal" / "session.json").unlink()
        with pytest.raises(SessionError, match=r"session\.json cannot be read"):
            collector.finalize(session)


def test_a_folder_that_is_no_session_is_named(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="is not a session"):
        collector.finalize(tmp_path)


def test_several_journals_are_applied_in_the_order_of_their_times(recording: Recording) -> None:
    """Two processes with the same story: their rows come in turn, whichever is read first."""
    with session_with(recording, recording.journal) as session:
        header, *others = frames(recording.journal)
        header = frame(Kind.HEADER, header[12:].replace(b'"rank":0', b'"rank":1'))
        second = journal_of(session).with_name("engine1.journal")
        second.write_bytes(b"".join([MAGIC, header, *others]))
        collector.finalize(session)
        tables = Tables(session)
        for table in ("kv_cache_usage.csv", "kv_cache_allocations.csv"):
            rows = tables.rows(table)
            of_each = [[{**row, "engine": 0} for row in rows if row["engine"] == e] for e in (0, 1)]
            assert of_each[0] == of_each[1]
            assert len(rows) == 2 * (recording.tables[table].count(b"\n") - 1)
            times = [row["timestamp_sec"] for row in rows]
            assert times == sorted(times)
        assert len(tables.metadata["processes"]) == 2
