# SPDX-License-Identifier: Apache-2.0
"""Segments together are the tables, wherever they end and whatever is killed meanwhile."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilemate import collector
from profilemate.collector import gpu_memory, producer, rotation, segments
from profilemate.collector.follower import Follower
from profilemate.collector.rotation import Rotation
from profilemate.collector.tables import COLUMNS
from profilemate.format import journal, processes
from profilemate.format.errors import SessionError
from profilemate.format.keep import ALL, Keep
from profilemate.record import recorder
from tests.analysis.test_segments import differences, said
from tests.collector.journals import OF_WORKERS, EngineJournal, WorkerJournal
from tests.collector.test_following import write_story
from tests.kv.recording import TABLES, Clock, found, hooks_only, make_tables, only_session
from tests.kv.workload import Driver, Setting, busy, scheduler_for
from tests.situations.test_window import WITHOUT_HISTORY
from tests.support.oracle import Oracle

SETTING = Setting(blocks=24, max_num_seqs=5, max_num_batched_tokens=128, policy="priority")
FILE_BYTES = 6_000
PAUSED = range(60, 66)
"""Operations during which the recording is paused."""
ALL_TABLES = (*TABLES, *OF_WORKERS)


@dataclass(frozen=True)
class Recording:
    """A session as its process left it, its tables without segments, and its first and last
    times."""

    session: Path
    tables: dict[str, bytes] = field(repr=False)
    begin_ns: int
    end_ns: int


@pytest.fixture(scope="module")
def recording(model: Path, hooks_on: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Its journal is in many files."""
    folder = tmp_path_factory.mktemp("recording")
    clock = Clock()
    begin = clock.now
    name = found(folder, clock)
    with (
        pytest.MonkeyPatch.context() as patch,
        Oracle().watching() as oracle,
        hooks_only(folder, clock, name=name, thread=False),
    ):
        patch.setattr(journal, "FILE_BYTES", FILE_BYTES)
        driver = Driver(scheduler_for(model, SETTING), oracle, clock, SETTING)
        (recording,) = recorder._living()
        for number, operation in enumerate(busy()):
            recording.wants_pause = number in PAUSED
            driver.do(operation)
    session = only_session(folder)
    assert len(list((session / "journal").glob("*.journal"))) > 5
    worker = WorkerJournal(folder / "beside")
    worker._origin = begin
    write_story(worker, 40)
    worker.recorder.close()
    shutil.copy(worker.path, session / "journal")
    tables = make_tables(session, folder / "tables")
    assert tables.metadata["complete"]
    return Recording(session, bytes_of(folder / "tables"), begin, clock.now)


def bytes_of(folder: Path) -> dict[str, bytes]:
    paths = [folder / table for table in ALL_TABLES]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def whole(session: Path) -> dict[str, bytes]:
    """The session's tables over all of its segments, without their repeated headers."""
    found: dict[str, bytes] = {}
    numbers = sorted(path for path in (session / "segments").glob("*") if path.name.isdigit())
    for folder in numbers:
        for path in sorted(folder.glob("[!o]*.gz")):
            if path.name != segments.CHECKPOINT_FILE:
                stem, number, *_ = path.name.split(".")
                assert number == folder.name
                name = f"{stem}.jsonl" if stem == "requests" else f"{stem}.csv"
                add(found, name, gzip.decompress(path.read_bytes()))
    for name, data in bytes_of(session).items():
        add(found, name, data)
    return found


def add(found: dict[str, bytes], name: str, data: bytes) -> None:
    header = COLUMNS[name]
    if name in found and header is not None:
        data = data.removeprefix(f"{header}\n".encode())
    found[name] = found.get(name, b"") + data


@contextmanager
def copied(recording: Recording) -> Iterator[Path]:
    """The recorded session, whose process is gone."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        session = Path(folder, "session")
        shutil.copytree(recording.session, session)
        patch.setattr(processes, "is_alive", lambda pid, start: False)
        patch.setattr(producer, "HEADER_SEC", 0.0)
        yield session


def begun(session: Path) -> Follower:
    """A collector that begins, or goes on where another was killed."""
    follower = Follower(session, session)
    follower.segments.clear()
    follower.resume()
    follower.tables.begin_anew(gpu_memory.TABLE)
    return follower


def advance(follower: Follower, until: int) -> None:
    follower.discover()
    while follower.read():
        pass
    follower.apply(until)


def end(follower: Follower) -> None:
    follower.discover()
    while follower.read():
        follower.apply()
    assert follower.segments.finish() or not follower.segments.is_closing
    follower.close()


def test_journals_in_files_make_the_same_tables(recording: Recording, tmp_path: Path) -> None:
    paths = sorted((recording.session / "journal").glob("engine0*.journal"))
    tables = make_tables(recording.session, tmp_path / "tables")
    assert bytes_of(tables.folder) == recording.tables
    assert all(path.stat().st_size < 3 * FILE_BYTES for path in paths)
    assert tables.metadata["cost"]["journal_bytes"] > (len(paths) - 1) * FILE_BYTES


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_segments_are_the_tables_wherever_they_end(
    recording: Recording, data: st.DataObject
) -> None:
    moments = st.integers(recording.begin_ns, recording.end_ns)
    times = data.draw(st.lists(moments, min_size=1, max_size=6).map(sorted))
    with copied(recording) as session:
        follower = begun(session)
        for time in times:
            advance(follower, time)
            assert follower.can_be_saved
            follower.cut(time)
            assert follower.segments.finish()
            follower.drop_read_journals()
            if data.draw(st.booleans(), "killed"):
                # Some more, which comes again.
                follower.apply(time + data.draw(st.integers(0, 10**9)))
                follower = begun(session)
        end(follower)
        assert whole(session) == recording.tables
        check_indexes(session)
        metadata = json.loads((session / "metadata.json").read_bytes())
        assert [each["problem"] for each in metadata["processes"]] == [None, None]
        assert metadata["complete"]
        assert metadata["segments"] == len(times)
        assert metadata["window"] is None
        assert [each["mismatches"] for each in metadata["processes"]] == [0, 0]


def check_indexes(session: Path) -> None:
    before = 0.0
    for folder in sorted((session / "segments").iterdir()):
        index = json.loads((folder / segments.INDEX_FILE).read_bytes())
        assert index["segment"] == int(folder.name)
        assert index["begin_sec"] == before
        before = index["end_sec"]
        names = {path.name for path in folder.glob("*.gz")} - {segments.CHECKPOINT_FILE}
        assert names == set(index["tables"])
        for name, entry in index["tables"].items():
            packed = (folder / name).read_bytes()
            plain = gzip.decompress(packed)
            assert (entry["bytes"], entry["plain_bytes"]) == (len(packed), len(plain))
            assert entry["crc32"] == f"{zlib.crc32(plain):08x}"
            assert entry["rows"] == plain.count(b"\n") - ("jsonl" not in name)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_finalize_goes_on_from_the_last_segment(recording: Recording, data: st.DataObject) -> None:
    time = data.draw(st.integers(recording.begin_ns, recording.end_ns))
    with copied(recording) as session:
        follower = begun(session)
        advance(follower, time)
        follower.cut(time)
        assert follower.segments.finish()
        follower.drop_read_journals()
        follower.apply(time + data.draw(st.integers(0, 10**9)))
        collector.finalize(session)
        assert whole(session) == recording.tables
        assert not (session / "journal").exists()
        assert json.loads((session / "metadata.json").read_bytes())["complete"]


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_kill_while_a_segment_is_closed(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """After so many calls that change files, nothing more is done."""
    middle = (recording.begin_ns + recording.end_ns) // 2
    with copied(recording) as session:
        follower = begun(session)
        advance(follower, middle)
        with pytest.MonkeyPatch.context() as patch:
            killed_after(patch, at)
            with suppress(OSError):
                follower.cut(middle)
            follower.segments.finish()
        collector.finalize(session)
        assert whole(session) == recording.tables
        names = [path.name for path in (session / "segments").glob(".*")]
        assert names == []


@pytest.mark.parametrize("applied", range(1, 6))
def test_a_segment_ends_in_the_midst_of_a_frame(tmp_path: Path, applied: int) -> None:
    """A frame has all steps of some milliseconds: those that were applied do not come again."""
    engine = EngineJournal(tmp_path)
    for step in range(1, 7):
        engine.allocated(1_000_000 * step, step)
    engine.killed()
    tables = bytes_of(make_tables(engine.folder, tmp_path / "tables").folder)
    follower = begun(engine.folder)
    advance(follower, engine.at(1_000_000 * applied))
    follower.cut(engine.at(1_000_000 * applied))
    assert follower.segments.finish()
    end(begun(engine.folder))
    assert whole(engine.folder) == tables
    assert tables["scheduler_steps.csv"].count(b"\n") == 7


def test_rows_that_are_being_closed_and_in_no_journal_stay(recording: Recording) -> None:
    with copied(recording) as session, pytest.MonkeyPatch.context() as patch:
        follower = begun(session)
        advance(follower, recording.end_ns)
        patch.setattr(segments, "_close", lambda *_: fail())
        follower.cut(recording.end_ns)
        follower.segments.finish()
        for path in (session / "journal").glob("engine0.0*.journal"):
            path.unlink()
        closing = session / "segments" / ".closing-0001"
        before = bytes_of(closing)
        with pytest.raises(SessionError, match="stays as it is: its journals have less"):
            collector.finalize(session)
        assert bytes_of(closing) == before
        assert (session / "journal-kept" / "engine0.journal").stat().st_size > 0


@pytest.mark.parametrize("later", [0, 2], ids=["nothing since", "samples since"])
def test_samples_that_are_in_no_journal_stay(recording: Recording, later: int) -> None:
    """The collector takes them; one is killed while it closes a segment, the next one goes on."""
    sample = "{},0,1,1,1".format
    with copied(recording) as session:
        follower = begun(session)
        advance(follower, recording.end_ns)
        follower.tables.extend(gpu_memory.TABLE)([sample(1), sample(2)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "_close", lambda *_: fail())
            follower.cut(recording.end_ns)
            follower.segments.finish()
            follower.tables.extend(gpu_memory.TABLE)([sample(3 + each) for each in range(later)])
            follower.tables.flush()
        collector.finalize(session)
        rows = (session / gpu_memory.TABLE).read_text().splitlines()
        assert rows[1:] == [sample(1 + each) for each in range(2 + later)]
        assert rows[0] == COLUMNS[gpu_memory.TABLE]


def fail() -> None:
    raise OSError(28, "no space left on device")


def killed_after(patch: pytest.MonkeyPatch, calls: int) -> None:
    """All calls of this process that change a folder fail from then on."""
    left = [calls]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(5, "it was killed")
            return call(*args, **kwargs)

        return instead

    for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
        patch.setattr(f"profilemate.format.folder.os.{name}", counted(getattr(segments.os, name)))


def test_what_is_kept(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest segments go; the others are what they were; numbers are not used again."""
    count = 8
    step = (recording.end_ns - recording.begin_ns) // count
    with copied(recording) as session:
        follower = begun(session)
        keep = Rotation(follower, ALL)
        sizes = []
        for number in range(1, count):
            advance(follower, recording.begin_ns + number * step)
            follower.cut(recording.begin_ns + number * step)
            assert follower.segments.finish()
            keep.remove_old()
            sizes.append(follower.segments.closed[-1].size)
        assert len(follower.segments.closed) == count - 1
        most = follower.session_size() - sum(sizes[:-3])
        keep = Rotation(follower, Keep(most, None))
        keep.remove_old()
        left = sorted(path.name for path in (session / "segments").iterdir())
        assert left == ["0005", "0006", "0007"]
        follower = begun(session)
        assert follower.segments.number == count
        end(follower)
        metadata = json.loads((session / "metadata.json").read_bytes())
        window = metadata["window"]
        assert window["removed_segments"] == 4
        assert window["begin_sec"] == pytest.approx(4 * step / 1e9, abs=2e-6)
        kept = whole(session)
        for table, data in recording.tables.items():
            rows = kept.get(table, b"").removeprefix(f"{COLUMNS[table]}\n".encode())
            assert data.endswith(rows)
        gone = sum(map(len, recording.tables.values())) - sum(map(len, kept.values()))
        assert 0 < gone <= window["removed_bytes"]


def test_what_is_kept_by_age(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    with copied(recording) as session:
        follower = begun(session)
        for number in (1, 2, 3):
            time = recording.begin_ns + number * 1_000_000_000
            advance(follower, time)
            follower.cut(time)
            assert follower.segments.finish()
        monkeypatch.setattr(
            rotation.time, "monotonic_ns", lambda: recording.begin_ns + 3_500_000_000
        )
        Rotation(follower, Keep(None, 2.0)).remove_old()
        assert [each.number for each in follower.segments.closed] == [2, 3]
        Rotation(follower, Keep(None, 0.1)).remove_old()
        # The last one has the state from which everything goes on.
        assert [each.number for each in follower.segments.closed] == [3]
        follower.close()


OF_A_WINDOW = (
    *WITHOUT_HISTORY,
    *(".session.", ".cost.table_bytes", ".run"),
    # A graph's replays are of the whole run, the tokens that they served of the window.
    *(".cuda_graphs.absent", ".graph_ledger.graphs"),
)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5, 0.65, 0.8])
def test_what_is_left_says_what_the_whole_says_of_that_time(
    recording: Recording, share: float
) -> None:
    with copied(recording) as session:
        full = Path(shutil.copytree(session, session.with_name("full")))
        collector.finalize(full)
        follower = begun(session)
        time = recording.begin_ns + int(share * (recording.end_ns - recording.begin_ns))
        for moment in (time, time + 300_000_000):
            advance(follower, moment)
            follower.cut(moment)
            assert follower.segments.finish()
        follower.segments.remove_first()
        end(follower)
        begin = follower.segments.closed[0].begin_sec
        found = differences(said(session), said(full, after_sec=begin))
        assert [each for each in found if not each.startswith(OF_A_WINDOW)] == []
