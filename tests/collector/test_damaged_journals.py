# SPDX-License-Identifier: Apache-2.0
"""What a damaged journal says is left out, is a problem, and costs nothing else."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilemate import collector
from profilemate.collector.follower import Follower
from profilemate.format.events import FRAME, More, Op
from profilemate.format.journal import MAGIC, Kind, frame
from profilemate.record import encode
from tests.collector.journals import (
    CAPTURES,
    TIMELINE,
    EngineJournal,
    Journal,
    WorkerJournal,
    lines,
    make_tables,
    metadata,
    rows,
)

STEPS = "scheduler_steps.csv"
ALLOCATIONS = "kv_cache_allocations.csv"
HEAD = 12
"""Bytes of a frame before its payload."""


def engine(folder: Path, steps: int = 6, **header: Any) -> EngineJournal:
    """An engine that ended after some steps, a second apart, each of which is a frame."""
    journal = EngineJournal(folder, **header)
    for step in range(1, steps + 1):
        journal.allocated(1_000_000 * step, step)
        journal.flush()
    journal.recorder.close()
    return journal


def worker(folder: Path, executions: int = 6) -> WorkerJournal:
    """A worker that was killed; each of its events is a frame."""
    journal = WorkerJournal(folder)
    journal.graph(10, 1, ("FULL", 8, None, 0, 0))
    journal.flush()
    journal.captured(20, 40, 1, kib=3)
    journal.flush()
    journal.batch(50, 1, ("NONE", 99, None, 0, 0))
    journal.flush()
    for number in range(executions):
        journal.executed(100 + number, 1, tokens=99)
        journal.flush()
        journal.executed(100 + number, 0, 8, entry=1, graphs=1, launch_ns=5_000)
        journal.flush()
    journal.killed()
    return journal


def frames(data: bytes) -> list[bytes]:
    """The frames of a journal, as they are in it."""
    found, at = [], len(MAGIC)
    while at < len(data):
        end = at + HEAD + int.from_bytes(data[at : at + 4], "little")
        found.append(data[at:end])
        at = end
    return found


def with_frames(journal: Journal, change: Callable[[list[bytes]], Any]) -> bytes:
    """The journal's bytes after a change of its list of frames."""
    listed = frames(journal.path.read_bytes())
    change(listed)
    return MAGIC + b"".join(listed)


def completed(journal: Journal, data: bytes) -> Path:
    """The tables of the journal's session, with these bytes in its place."""
    journal.path.write_bytes(data)
    # A journal without a header is of a process that is about to begin, if it is young.
    os.utime(journal.path, (1_700_000_000, 1_700_000_000))
    return make_tables(journal.folder, journal.folder / "tables")


def problem(folder: Path) -> str:
    """The one problem of a session that is not complete."""
    found = metadata(folder)
    (process,) = (process for process in found["processes"] if process["problem"])
    assert not found["complete"]
    return str(process["problem"])


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def at_frame(data: bytes, number: int) -> int:
    return len(MAGIC) + sum(map(len, frames(data)[:number]))


@pytest.mark.parametrize("field", [0, 4, 8, HEAD + 40], ids=["length", "checksum", "kind", "data"])
def test_bit_of_an_engine(tmp_path: Path, field: int) -> None:
    """Blocks end there; the steps that follow are there; it says where and how much."""
    journal = engine(tmp_path)
    data = journal.path.read_bytes()
    at = at_frame(data, 3)
    tables = completed(journal, flipped(data, at + field))
    assert f"{len(frames(data)[3])} bytes of its journal at byte {at:,} are damaged" in problem(
        tables
    )
    assert [row["timestamp_sec"] for row in rows(tables, ALLOCATIONS)] == ["1.000000", "2.000000"]
    steps = [row["timestamp_sec"] for row in rows(tables, STEPS)]
    assert steps == ["1.000000", "2.000000", "4.000000", "5.000000", "6.000000"]
    assert [row["finished_reqs"] for row in rows(tables, STEPS)] == ["0", "0", "", "", ""]
    (process,) = metadata(tables)["processes"]
    assert set(process["lost"]) == {"blocks", "frees", "lookups", "requests", "updates"}
    assert process["ended"] == "exit"


def test_status_that_is_damaged_loses_no_events(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path)
    journal.allocated(1_000, 1)
    journal.flush()
    journal.status(methods={"attached": []})
    journal.flush()
    journal.allocated(2_000, 2)
    journal.killed()
    data = journal.path.read_bytes()
    tables = completed(journal, flipped(data, at_frame(data, 2) + HEAD))
    assert "bytes of its journal at byte" in problem(tables)
    assert len(rows(tables, ALLOCATIONS)) == 2
    assert metadata(tables)["processes"][0]["lost"] == {}


def test_bit_of_a_worker(tmp_path: Path) -> None:
    """Its other executions are there; those of what is not known are of unknown graphs."""
    journal = worker(tmp_path)
    data = journal.path.read_bytes()
    tables = completed(journal, flipped(data, at_frame(data, 1) + HEAD + 50))
    assert "at byte" in problem(tables)
    assert len(rows(tables, TIMELINE)) == 12
    assert {row["num_tokens"] for row in rows(tables, TIMELINE)} == {"99", ""}
    assert [row["source"] for row in rows(tables, CAPTURES)] == ["unknown"]


def test_session_of_others_goes_on(tmp_path: Path) -> None:
    broken, other = engine(tmp_path), worker(tmp_path)
    completed(broken, b"nothing of ours, but long enough to be a journal")
    folder = broken.folder / "tables"
    assert problem(folder) == "engine0.journal is not a profilemate journal"
    assert len(rows(folder, TIMELINE)) == 12
    assert other.folder == broken.folder


def test_last_frame_of_a_killed_process(tmp_path: Path) -> None:
    """All of it is there, and it is not what was written: no write that was cut short."""
    journal = worker(tmp_path)
    data = journal.path.read_bytes()
    size = len(frames(data)[-1])
    tables = completed(journal, flipped(data, len(data) - 1))
    assert f"{size} bytes of its journal at byte {len(data) - size:,} are damaged" in problem(
        tables
    )


def test_frames_that_are_missing_before_a_torn_one(tmp_path: Path) -> None:
    """It gives the time of the last event before it."""
    journal = worker(tmp_path)
    data = journal.path.read_bytes()
    begin, torn = at_frame(data, 8), at_frame(data, 10)
    tables = completed(journal, data[:begin] + data[torn : torn + HEAD + FRAME.size + 3])
    assert problem(tables) == f"events are missing before byte {begin:,}"


def test_torn_header_that_is_not_the_first_frame(tmp_path: Path) -> None:
    journal = worker(tmp_path)
    data = journal.path.read_bytes()
    begin = at_frame(data, 8)
    tables = completed(journal, data[:begin] + frames(data)[0][:60])
    assert f"60 bytes of its journal at byte {begin:,} are damaged" in problem(tables)


def test_torn_frame_whose_columns_have_another_length(tmp_path: Path) -> None:
    journal = worker(tmp_path)
    data = journal.path.read_bytes()
    begin = at_frame(data, 8)
    head = (1 << 20).to_bytes(4, "little") + data[begin + 4 : begin + HEAD + FRAME.size + 3]
    tables = completed(journal, data[:begin] + head + random.Random(1).randbytes(500))
    assert f"at byte {begin:,} are damaged" in problem(tables)


@pytest.mark.parametrize(
    "behind", [b"", frame(Kind.STATUS, b'{"hook_ns":9}')], ids=["events", "status"]
)
def test_length_of_the_last_frame(tmp_path: Path, behind: bytes) -> None:
    """It asks for more than there is, as a torn frame does; but nothing is missing."""
    journal = worker(tmp_path)
    data = journal.path.read_bytes() + behind
    at = len(data) - len(frames(data)[-1])
    assert "are damaged" in problem(completed(journal, flipped(data, at + 1)))


@pytest.mark.parametrize("behind", [bytes(4_096), b"\1", bytes(12)], ids=["page", "byte", "head"])
def test_bytes_behind_the_end(tmp_path: Path, behind: bytes) -> None:
    journal = engine(tmp_path)
    tables = completed(journal, journal.path.read_bytes() + behind)
    assert problem(tables)
    assert len(rows(tables, ALLOCATIONS)) == 6


def test_frame_that_is_there_twice(tmp_path: Path) -> None:
    """It counts once, and nothing is lost."""
    journal = engine(tmp_path)
    tables = completed(journal, with_frames(journal, lambda found: found.insert(4, found[3])))
    assert "do not follow those before" in problem(tables)
    assert len(rows(tables, ALLOCATIONS)) == len(rows(tables, STEPS)) == 6


def test_frames_that_are_there_once_more_at_the_end(tmp_path: Path) -> None:
    journal = engine(tmp_path)
    tables = completed(journal, with_frames(journal, lambda found: found.extend(found[1:])))
    assert "frames follow its end" in problem(tables)
    assert len(rows(tables, STEPS)) == 6


def test_frames_in_another_order(tmp_path: Path) -> None:
    journal = engine(tmp_path)

    def swap(found: list[bytes]) -> None:
        found[3], found[4] = found[4], found[3]

    tables = completed(journal, with_frames(journal, swap))
    assert "do not follow those before" in problem(tables)
    assert len(rows(tables, ALLOCATIONS)) == 3
    assert len(rows(tables, STEPS)) == 5


@pytest.mark.parametrize("number", [1, 3])
def test_frame_that_is_missing(tmp_path: Path, number: int) -> None:
    """The first one, too: the header has the time that it follows on."""
    journal = engine(tmp_path)
    tables = completed(journal, with_frames(journal, lambda found: found.pop(number)))
    assert "do not follow those before" in problem(tables)
    assert len(lines(tables, ALLOCATIONS)) == number - 1
    assert len(rows(tables, STEPS)) == 5


def test_last_frames_that_are_missing(tmp_path: Path) -> None:
    """No frame of events follows; the end says how long the journal was."""
    journal = engine(tmp_path)
    tables = completed(journal, with_frames(journal, lambda found: found.pop(-2)))
    assert "bytes are missing, or written twice, before byte" in problem(tables)


def test_frame_of_another_journal(tmp_path: Path) -> None:
    journal, other = engine(tmp_path), engine(tmp_path, rank=1)
    stranger = frames(other.path.read_bytes())[3]
    data = with_frames(journal, lambda found: found.insert(5, stranger))
    tables = completed(journal, data)
    assert "do not follow those before" in problem(tables)
    of_it = [row for row in rows(tables, ALLOCATIONS) if row["engine"] == "0"]
    assert len(of_it) == 6


def test_journal_of_another(tmp_path: Path) -> None:
    journal, other = engine(tmp_path), engine(tmp_path, rank=1)
    tables = completed(journal, other.path.read_bytes())
    assert "header: of engine 1" in problem(tables)
    assert {row["engine"] for row in rows(tables, STEPS)} == {"1"}


def test_kind_of_a_newer_release(tmp_path: Path) -> None:
    """It is left out, and nothing else is."""
    journal = engine(tmp_path)
    newer: Any = 7
    data = with_frames(journal, lambda found: found.insert(3, frame(newer, b"news")))
    tables = completed(journal, data)
    assert "of a newer profilemate: frame kind 7 at byte" in problem(tables)
    assert len(rows(tables, ALLOCATIONS)) == 6


def test_event_of_a_newer_release(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path)
    for step in range(1, 7):
        if step == 3:
            journal.keep((encode.more, Op.MORE, journal.at(1_000_000 * step), 99, ["news"]))
        journal.allocated(1_000_000 * step, step)
        journal.flush()
    journal.recorder.close()
    tables = completed(journal, journal.path.read_bytes())
    assert "of a newer profilemate: unknown kind 99 (at byte" in problem(tables)
    assert len(rows(tables, ALLOCATIONS)) == 2
    assert len(rows(tables, STEPS)) == 5


def test_journal_of_a_newer_release(tmp_path: Path) -> None:
    journal = engine(tmp_path)
    data = b"profilemate journal 12\n" + journal.path.read_bytes()[len(MAGIC) :]
    tables = completed(journal, data)
    expected = "engine0.journal is of another profilemate (its journals have version 12): read it"
    assert problem(tables).startswith(expected)


DEEP: Any = None
for _ in range(40):
    DEEP = [DEEP]

HEADERS = [
    {"pools": [{"blocks": 2_000_000_000, "null": 0}]},
    {"pools": [{"blocks": 1 << 63, "null": 0}]},
    {"pools": [{"blocks": "11", "null": 0}]},
    {"pools": [{"blocks": 11, "null": 11}]},
    {"pools": {}},
    {"pools": [{"blocks": 11, "null": 0}] * 9},
    {"groups": [{"pool": 1}]},
    {"groups": None},
    {"rank": -1},
    {"rank": 1 << 40},
    {"rank": True},
    {"pid": 0},
    {"pid": 1 << 70},
    {"start": 5},
    {"hash_block_size": 0},
    {"cache": {"max_model_len": "long"}},
    {"hooks": ["schedule"]},
    {"producer": "scheduler"},
    {"model": DEEP},
]


@pytest.mark.parametrize("wrong", HEADERS, ids=lambda wrong: json.dumps(wrong)[:40])
def test_header_of_another_type(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """One line says what is wrong; no block is made for a claimed number."""
    journal = engine(tmp_path)

    def change(found: list[bytes]) -> None:
        header = {**json.loads(found[0][HEAD:]), **wrong}
        found[0] = frame(Kind.HEADER, json.dumps(header).encode())

    tables = completed(journal, with_frames(journal, change))
    assert "(at byte 22); its header cannot be read" in problem(tables)
    assert not lines(tables, STEPS)


TEXTS = [b"[]", b"{", b"[" * 100_000, b'{"a":NaN}', b'{"failed":{"x":1}}', b'{"hook_ns":1e999}']


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.END, Kind.HEADER], ids=lambda kind: kind.name)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12].decode())
def test_json_of_another_type(tmp_path: Path, kind: Kind, text: bytes) -> None:
    journal = engine(tmp_path)
    data = with_frames(journal, lambda found: found.insert(3, frame(kind, text)))
    tables = completed(journal, data)
    assert "(at byte" in problem(tables)
    assert len(rows(tables, ALLOCATIONS)) == 6


def test_times_of_no_session(tmp_path: Path) -> None:
    for at in (-1_000_000_000, 1 << 60):
        journal = EngineJournal(tmp_path / str(at))
        journal.allocated(1_000, 1)
        journal.flush()
        journal.keep((encode.blocks, Op.ALLOCATE, max(0, journal.at(0) + at)))
        journal.allocated(2_000, 2)
        journal.killed()
        tables = completed(journal, journal.path.read_bytes())
        assert "a time is not of this session" in problem(tables)
        assert len(rows(tables, ALLOCATIONS)) == 1


def _request(journal: EngineJournal, number: int, described: object) -> None:
    blob = json.dumps(described).encode() + b"\0"
    journal.keep((encode.blob, Op.REQUEST, journal.at(1_500), number, blob))


def _numbers(journal: EngineJournal, op: Op, *numbers: int) -> None:
    journal.keep((encode.once, op, journal.at(1_500), numbers))


IMPOSSIBLE: dict[str, Callable[[EngineJournal], None]] = {
    "block 1 was handed out while": lambda j: j.allocated(1_500, 1),
    "IndexError": lambda j: j.allocated(1_500, 11),
    "found 17": lambda j: (_request(j, 0, ["a", 16]), _numbers(j, Op.LOOKUP, 0, 16, 17, 0))[0],
    "came after 0 others": lambda j: _request(j, 1, ["a", 16]),
    "is not described as one": lambda j: _request(j, 0, ["a", "16"]),
    "request 0 is not described as one": lambda j: _request(j, 0, ["a", 16, 0, None, 7, 0, -1]),
    "0 is not described as one": lambda j: _request(j, 0, ["a", 16, 0, None, 7, 0, 0, 1]),
    "drafts that are not counted as such": lambda j: (
        _request(j, 0, ["a", 16]),
        j.keep((encode.more, Op.MORE, j.at(1_500), More.DRAFTS, [0, 1, 2])),
    )[1],
    "a trace that is not named as one": lambda j: (
        _request(j, 0, ["a", 16]),
        j.keep((encode.more, Op.MORE, j.at(1_500), More.TRACE, [0, "=1+1", "0" * 16])),
    )[1],
    "is not described": lambda j: _request(j, 0, {"a": 16}),
    "a prompt of": lambda j: _request(j, 0, ["a", 1 << 40]),
    "4,000,000,001 tokens": lambda j: (
        _request(j, 0, ["a", 16]),
        _numbers(j, Op.FINISH, 0, 4_000_000_000, 1, 0, 0, 0),
    )[0],
    "blocks are free": lambda j: _numbers(j, Op.UPDATE, 1, 0, 11),
    "of them prefill": lambda j: j.keep(
        (encode.between, Op.STEP, j.at(1_400), j.at(1_500), (1, 0, 16, 17, 1, 9))
    ),
    "a step of -0.0001 s": lambda j: j.keep(
        (encode.between, Op.STEP, j.at(1_500), j.at(1_400), (1, 0, 16, 16, 1, 9))
    ),
    "KeyError": lambda j: _numbers(j, Op.PREEMPT, 7, 1),
}


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_what_no_engine_can_have_done(tmp_path: Path, said: str) -> None:
    """What depends on it ends; no row counts it."""
    journal = EngineJournal(tmp_path)
    journal.allocated(1_000, 1)
    journal.flush()
    IMPOSSIBLE[said](journal)
    journal.flush()
    journal.allocated(2_000, 2)
    journal.killed()
    tables = completed(journal, journal.path.read_bytes())
    assert said in problem(tables)
    assert [row["timestamp_sec"] for row in rows(tables, ALLOCATIONS)] == ["0.001000"]
    assert rows(tables, STEPS)[-1]["timestamp_sec"] == "0.002000"


def _finish(journal: EngineJournal, at: int) -> None:
    journal.keep((encode.once, Op.FINISH, journal.at(at), (0, 16, 1, 17, 0, 0)))


def _handed_out(journal: EngineJournal, *blocks: int) -> None:
    listed = [SimpleNamespace(block_id=block) for block in blocks]
    journal.keep((encode.blocks, Op.ALLOCATE, journal.at(1_500), *listed))


def _lost_before(journal: EngineJournal) -> None:
    """A block loses its content before it gets it."""
    _handed_out(journal, 2)
    listed, numbers = [SimpleNamespace(block_id=2)], (0, 0, 16, 16)
    journal.keep(
        (encode.cached_list, Op.CACHE_LIST, journal.at(1_500), numbers, listed, [bytes(8)])
    )
    journal.keep((encode.evicted, Op.EVICT, journal.at(1_400), [2]))


UNLIKE_BEFORE: dict[str, Callable[[EngineJournal], None]] = {
    "request 0 ended twice": lambda j: (
        _request(j, 0, ["a", 16]),
        _finish(j, 1_600),
        _finish(j, 1_600),
    )[0],
    "request 0 ended before it came": lambda j: (
        _request(j, 0, ["a", 16]),
        _finish(j, 1_400),
    )[0],
    "more than 10 blocks are held": lambda j: (
        _handed_out(j, 0, *range(2, 11)),
        _numbers(j, Op.UPDATE, 1, 0, 0),
    )[0],
    "block 2 lost its content before it had it": _lost_before,
}


@pytest.mark.parametrize("said", UNLIKE_BEFORE)
def test_what_no_engine_can_have_done_after_what_it_did(tmp_path: Path, said: str) -> None:
    """What it did before in the same step may be there; nothing that depends on it follows."""
    journal = EngineJournal(tmp_path)
    journal.allocated(1_000, 1)
    journal.flush()
    UNLIKE_BEFORE[said](journal)
    journal.flush()
    journal.allocated(2_000, 2)
    journal.killed()
    tables = completed(journal, journal.path.read_bytes())
    assert said in problem(tables)
    assert "0.002000" not in [row["timestamp_sec"] for row in rows(tables, ALLOCATIONS)]
    assert rows(tables, STEPS)[-1]["timestamp_sec"] == "0.002000"


def test_worker_that_says_the_impossible(tmp_path: Path) -> None:
    """Each is a problem; the executions behind it are there."""
    wrong: list[Callable[[WorkerJournal], None]] = [
        lambda w: w.graph(60, 1, ("FULL", 8, None, 0, 0)),
        lambda w: w.batch(60, 1, ("FULL", 8, None, 0, 0)),
        lambda w: w.batch(60, 2, ("FULL", -8, None, 0, 0)),
        lambda w: w._blob(Op.BATCH, 60, 2, ["FULL"]),
        lambda w: w._blob(Op.GRAPH, 60, 2, ["FULL", 1, 1, 0, 0, "x", None, "model"]),
        lambda w: w.captured(60, 50, 1, kib=1),
        lambda w: w.executed(60, 1, 8, dummy=2),
        lambda w: w.executed(60, 9, 8),
        lambda w: w.replayed(60, 9, 1),
    ]
    for number, keep in enumerate(wrong):
        journal = WorkerJournal(tmp_path / str(number))
        journal.graph(10, 1, ("FULL", 8, None, 0, 0))
        journal.batch(50, 1, ("NONE", 99, None, 0, 0))
        journal.flush()
        keep(journal)
        journal.flush()
        journal.executed(100, 1, tokens=99)
        journal.killed()
        tables = completed(journal, journal.path.read_bytes())
        assert "events could not be applied" in problem(tables), number
        assert rows(tables, TIMELINE)[-1]["num_tokens"] == "99"


def test_text_that_would_break_a_row(tmp_path: Path) -> None:
    journal = WorkerJournal(tmp_path)
    journal.batch(50, 1, ('FU,LL"\n', 99, None, 0, 0))
    journal.executed(100, 1, tokens=99)
    journal.killed()
    tables = make_tables(journal.folder, tmp_path / "tables")
    assert rows(tables, TIMELINE)[0]["runtime_mode"] == 'FU,LL"\\x0a'


def test_journal_that_still_grows(tmp_path: Path) -> None:
    """What cannot be read yet may be a write under way: it waits, until whole frames follow it."""
    start = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    journal = engine(tmp_path, start=start)
    data = journal.path.read_bytes()
    whole = frames(data)
    at = at_frame(data, 3)
    target = tmp_path / "tables"
    target.mkdir()
    journal.path.write_bytes(flipped(data[: at + len(whole[3])], at + HEAD))
    follower = Follower(journal.folder, target)
    follower.discover()
    (producer,) = follower.producers.values()
    for _ in range(5):
        follower.read()
    assert producer.problem is None
    assert producer.position == at
    with journal.path.open("ab") as file:
        file.write(b"".join(whole[4:-1]))
    follower.read()
    assert producer.problem is not None
    # It was a write under way after all, on another journal.
    journal.path.write_bytes(data[: at + 30])
    follower = Follower(journal.folder, target)
    follower.discover()
    (producer,) = follower.producers.values()
    for _ in range(5):
        follower.read()
    journal.path.write_bytes(data)
    while follower.read():
        follower.apply()
    assert producer.problem is None


def test_damage_in_a_large_journal_is_passed_in_time(tmp_path: Path) -> None:
    """What looks like the heads of many large frames is not compared with its checksums for
    ever."""
    journal = worker(tmp_path)
    data = journal.path.read_bytes()
    head = (4_000_000).to_bytes(4, "little") + b"sum!" + (3).to_bytes(4, "little") + b"{"
    looks_like = head * 500_000
    at = at_frame(data, 2)
    tables = completed(journal, data[:at] + looks_like + data[at:])
    assert problem(tables)


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_is_damaged(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A session says that it is damaged, and completes; nothing is there twice.

    ``python -m attacks journals`` does it at length.
    """
    chance = random.Random(seed)
    journal = engine(tmp_path_factory.mktemp("damaged"))
    data = bytearray(journal.path.read_bytes())
    for _ in range(chance.randrange(1, 4)):
        begin = chance.randrange(len(MAGIC), len(data))
        end = min(len(data), begin + chance.choice((1, 1, 8, 100)))
        data[begin:end] = chance.choice((bytes(end - begin), b"", chance.randbytes(end - begin)))
        data = data or bytearray(MAGIC)
    whole = journal.path.read_bytes()
    is_damaged = bytes(data) != whole
    # Less of the last frame is what a kill leaves, too.
    is_torn = whole.startswith(data) or data.startswith(whole[: at_frame(whole, -1)])
    journal.path.write_bytes(data)
    os.utime(journal.path, (1_700_000_000, 1_700_000_000))
    folder = journal.folder
    collector.finalize(folder)
    assert len(lines(folder, STEPS)) <= 6
    assert len(lines(folder, ALLOCATIONS)) <= 6
    assert is_torn or metadata(folder)["complete"] is not is_damaged
