# SPDX-License-Identifier: Apache-2.0
"""What may go wrong with the recording, and that vLLM does not notice."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator
from operator import length_hint
from pathlib import Path
from typing import Any

import pytest

from profilemate import collector
from profilemate.collector.follower import Follower
from profilemate.format.errors import SessionError
from profilemate.format.events import Op
from profilemate.hooks.kv import block_pool, facts, steps
from profilemate.hooks.kv.requests import Requests
from profilemate.record import encode, recorder
from profilemate.record.recorder import Recorder
from profilemate.record.writer import Writer
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
from tests.kv.transcript import arrivals, transcript
from tests.support.scheduler import RequestMaker, build_scheduler, tokens

pytestmark = pytest.mark.usefixtures("hooks_on")

BLOCKS = 60


@pytest.fixture(scope="module")
def unprofiled(model: Path, hooks_on: None) -> list[Any]:
    """What vLLM does with the workload when nothing is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PROFILING", "0")
        return transcript(build_scheduler(model, BLOCKS), arrivals())


def record(model: Path, sessions: Path) -> list[Any]:
    """Record the workload, each step in a frame of its own; returns what vLLM did."""
    clock = Clock()
    with hooks_only(sessions, clock, name=found(sessions, clock), thread=False):
        scheduler = build_scheduler(model, BLOCKS)
        return transcript(scheduler, arrivals(), lambda: clock.tick(20_000))


@pytest.fixture(scope="module")
def whole(
    model: Path, hooks_on: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The tables of the workload when all goes well."""
    folder = tmp_path_factory.mktemp("whole")
    record(model, folder)
    return make_tables(only_session(folder), folder / "tables").bytes_of()


def check_prefix(tables: Tables, whole: dict[str, bytes]) -> None:
    """What was recorded before something went wrong is as it would have been."""
    for table in ("kv_cache_usage.csv", "kv_cache_allocations.csv", "kv_cache_evictions.csv"):
        content = tables.bytes_of().get(table, b"")
        assert whole[table].startswith(content)
        assert len(content) < len(whole[table])


def test_recording_changes_nothing(model: Path, tmp_path: Path, unprofiled: list[Any]) -> None:
    assert record(model, tmp_path) == unprofiled


def test_switched_off_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooks_only(tmp_path / "sessions"):
        monkeypatch.setenv("VLLM_PROFILING", "0")
        scheduler = build_scheduler(model, BLOCKS)
        assert not {"schedule", "add_request"} & set(vars(scheduler))
    assert not (tmp_path / "sessions").exists()


@pytest.mark.parametrize(
    ("frames", "spare"),
    [(1, 100), (1, 400), (2, 0), (2, 20), (12, 0), (12, 20), (12, 150), (12, 400), (20, 20)],
)
def test_disk_that_fills(
    model: Path,
    tmp_path: Path,
    unprofiled: list[Any],
    whole: dict[str, bytes],
    frames: int,
    spare: int,
) -> None:
    """No file of the process may grow beyond so many frames of the journal and some bytes: one
    line, what was written stays, and what is lost is counted."""
    record(model, tmp_path / "free")
    free = journal_of(only_session(tmp_path / "free")).read_bytes()
    limit = end_of_frame(free, frames) + spare

    def engine(say: Say) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with said() as lines:
            say(record(model, tmp_path / "full"))
        say(lines)

    child = Child(engine)
    results, lines = child.rest()
    assert child.end() == 0
    assert results == json_values(unprofiled)
    (line,) = lines
    assert line == (
        "profilemate: engine 0: recording stopped, the journal cannot be written "
        "(File too large); vLLM goes on"
    )
    session = only_session(tmp_path / "full")
    session_journal = journal_of(session).read_bytes()
    assert len(session_journal) <= limit
    collector.finalize(session)
    tables = Tables(session)
    check_prefix(tables, whole)
    if frames > 1:
        # There is more than the header, and so room to say it in.
        metadata = tables.metadata
        assert not metadata["complete"]
        kept = events_in(session_journal)
        assert kept + metadata["dropped_events"] == events_in(free)
        assert metadata["processes"][0]["hooks_failed"] == {"journal": "File too large"}


def test_disk_without_room_for_a_header(model: Path, tmp_path: Path, unprofiled: list[Any]) -> None:
    """One line, and nothing that a collector could take for a journal about to be written."""

    def engine(say: Say) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
        with said() as lines:
            say(record(model, tmp_path))
        say(lines)

    child = Child(engine)
    results, lines = child.rest()
    assert child.end() == 0
    assert results == json_values(unprofiled)
    assert len(lines) == 1
    session = only_session(tmp_path)
    assert not list((session / "journal").glob("*.journal"))
    with pytest.raises(SessionError, match="has no journal in it"):
        collector.finalize(session)


def frames_of(journal: bytes) -> list[tuple[int, bytes]]:
    """Kind and payload of every frame."""
    frames, at = [], journal.index(b"\n") + 1
    while at < len(journal):
        length, _, kind = struct.unpack_from("<III", journal, at)
        frames.append((kind, journal[at + 12 : at + 12 + length]))
        at += 12 + length
    return frames


def end_of_frame(journal: bytes, count: int) -> int:
    """Size of the journal when it has so many frames, the header being the first.

    Some bytes more or less in another process: the header has its number.
    """
    first = journal.index(b"\n") + 1
    return first + sum(12 + len(payload) for _, payload in frames_of(journal)[:count])


def events_in(journal: bytes) -> int:
    """How many events the journal holds."""
    return sum(
        int.from_bytes(payload[8:12], "little") for kind, payload in frames_of(journal) if kind == 2
    )


def json_values(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("spare", [20, 150, 400])
def test_collector_learns_that_the_disk_filled(model: Path, tmp_path: Path, spare: int) -> None:
    """It had read the last frames already when they made room for saying what is lost."""
    record(model, tmp_path / "free")
    free = journal_of(only_session(tmp_path / "free")).read_bytes()
    limit = end_of_frame(free, 15) + spare
    sessions, target = tmp_path / "full", tmp_path / "tables"
    target.mkdir()

    def engine(say: Say) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        clock = Clock()
        name = found(sessions, clock)
        with said(), hooks_only(sessions, clock, name=name, thread=False):
            scheduler = build_scheduler(model, BLOCKS)
            follower = Follower(only_session(sessions), target)
            follower.discover()
            transcript(scheduler, arrivals(), lambda: (clock.tick(20_000), follower.read()))
            (producer,) = follower.ordered()
            say(producer.status)
            recorder.close_all()
            follower.read()
            say([producer.status, producer.alive])

    child = Child(engine)
    early, (late, alive) = child.rest()
    assert child.end() == 0
    assert early["failed"] == {"journal": "File too large"}
    assert 0 < early["dropped_events"] <= late["dropped_events"]
    assert not alive


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("as a hook may")


def fails_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which works until this call and raises at it."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("as a hook may")
        return function(*args, **kwargs)

    return counted


LOST_WITH = {
    "free_blocks": ("blocks",),
    "cache_full_blocks": ("blocks",),
    "free": ("frees", "blocks"),
    "update_from_output": ("updates",),
    "add_request": ("requests",),
    "_free_request": ("requests",),
}


@pytest.mark.parametrize(
    ("owner", "name", "call", "where"),
    [
        (block_pool, "_record_free", 10, "free_blocks"),
        (block_pool, "length_hint", 10, "free_blocks"),
        (block_pool, "_record_cached", 10, "cache_full_blocks"),
        (Requests, "leaving", 10, "free"),
        (steps.Steps, "_assign", 10, "schedule"),
        (steps.Steps, "_record_first_tokens", 2, "update_from_output"),
        (steps.Steps, "_record_update", 10, "update_from_output"),
        (Requests, "number", 2, "add_request"),
        (Requests, "finish", 10, "_free_request"),
    ],
)
def test_hook_that_raises(
    model: Path,
    tmp_path: Path,
    unprofiled: list[Any],
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    where: str,
) -> None:
    """What needs it is lost, one line and the metadata say so, and vLLM goes on as without it."""
    monkeypatch.setattr(owner, name, fails_at(call, getattr(owner, name)))
    if name in ("_record_free", "_record_cached"):
        # Blocks are listed one by one where no block table names them.
        monkeypatch.setattr(facts, "is_tabled", lambda scheduler, pools: False)
    with said() as lines:
        assert record(model, tmp_path) == unprofiled
    reason = "RuntimeError: as a hook may"
    lost = LOST_WITH.get(where, ())
    (line,) = lines
    if lost:
        assert line.startswith("profilemate: engine 0: no longer recorded: ")
        assert line.endswith(f"({where}: {reason}). The rest is recorded, and vLLM goes on")
    else:
        stopped = f"recording stopped, {where} failed ({reason}); vLLM goes on"
        assert line == f"profilemate: engine 0: {stopped}"
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    if not lost or "blocks" in lost:
        check_prefix(tables, whole)
    elif "requests" in lost:
        # What became of the blocks is known as ever; test_lost_parts looks at all tables.
        for table in ("kv_cache_usage.csv", "kv_cache_allocations.csv", "kv_cache_evictions.csv"):
            assert tables.bytes_of()[table] == whole[table]
    metadata = tables.metadata
    assert not metadata["complete"]
    (process,) = metadata["processes"]
    assert set(process["lost"]) == set(lost)
    assert process["hooks_failed"] == ({} if lost else {where: reason})
    assert process["problem"] is None
    assert process["ended"] == "exit"


def test_hook_that_raises_and_whose_loss_cannot_be_recorded(
    model: Path, tmp_path: Path, unprofiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the recording ends, with one line."""
    monkeypatch.setattr(block_pool, "length_hint", fails_at(10, length_hint))
    monkeypatch.setattr(Recorder, "lose", broken)
    with said() as lines:
        assert record(model, tmp_path) == unprofiled
    (line,) = lines
    stopped = "recording stopped, free_blocks failed (RuntimeError: as a hook may); vLLM goes on"
    assert line == f"profilemate: engine 0: {stopped}"
    assert not make_tables(only_session(tmp_path), tmp_path / "tables").metadata["complete"]


def test_blocks_listed_one_by_one(
    model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are the same whether block tables name the blocks or they are listed."""
    monkeypatch.setattr(facts, "is_tabled", lambda scheduler, pools: False)
    record(model, tmp_path)
    assert make_tables(only_session(tmp_path), tmp_path / "tables").bytes_of() == whole


def test_vllm_is_the_first_to_look_at_an_iterator_of_blocks() -> None:
    """A hook that fails before has taken none out of it."""
    taken: list[int] = []

    def freed() -> Iterator[int]:
        for block in (3, 2, 1):
            taken.append(block)
            yield block

    looked_at, given = block_pool._walkable(freed())
    assert taken == []
    assert list(given) == list(looked_at) == [3, 2, 1]


def test_model_runner_in_the_same_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's goes on filling the block lists of the requests that it was given. So does this one,
    before they are written. Without a prefix cache nothing but these lists says who holds what."""
    held: dict[str, Any] = {}

    def fill(output: Any) -> None:
        for data in output.scheduled_new_reqs:
            held[data.req_id] = data.block_ids
        cached = output.scheduled_cached_reqs
        for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                held[request_id] = groups
            elif groups:
                for lists, more in zip(held[request_id], groups, strict=True):
                    lists.extend(more)

    clock = Clock()
    with hooks_only(tmp_path, clock, name=found(tmp_path, clock)):
        # Its thread is left behind, asleep.
        sleeper = Writer()
        monkeypatch.setattr(recorder, "_writer", sleeper)
        scheduler = build_scheduler(model, BLOCKS, enable_prefix_caching=False)
        sleeper.pause_sec = 3_600
        make = RequestMaker()
        requests = [make(f"request {index}", tokens(index, 40), 60) for index in range(6)]
        workload = [(0, request) for request in requests]
        transcript(scheduler, workload, lambda: clock.tick(20_000), fill)
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    assert len(tables.requests()) == len(requests)
    assert tables.metadata["processes"][0]["mismatches"] == 0


def test_hooks_are_taken_away(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the scheduler and its pool are as vLLM made them."""
    monkeypatch.setattr(steps.Steps, "scheduled", broken)
    with hooks_only(tmp_path), said():
        scheduler = build_scheduler(model, BLOCKS)
        manager = scheduler.kv_cache_manager
        watched = [scheduler, manager, manager.block_pool]
        assert all(hooked(instance) for instance in watched)
        transcript(scheduler, arrivals(3))
        assert not any(hooked(instance) for instance in watched)


def hooked(instance: Any) -> list[str]:
    """Methods that the object has replaced with its own."""
    return [name for name in vars(instance) if callable(getattr(type(instance), name, None))]


def test_request_that_cannot_be_described(model: Path, tmp_path: Path) -> None:
    """vLLM takes a salt of bytes; a hook that does not is no reason to refuse the request."""
    make = RequestMaker()
    with hooks_only(tmp_path), said() as lines:
        scheduler = build_scheduler(model, BLOCKS)
        request = make("request 1", tokens(1, 40), 3, cache_salt=b"salt")
        transcript(scheduler, [(0, request)])
    assert request.is_finished()
    assert len(lines) == 1
    assert "(add_request: AttributeError: " in lines[0]
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    assert set(tables.metadata["processes"][0]["lost"]) == {"requests"}
    allocated = [
        row for row in tables.rows("kv_cache_allocations.csv") if row["event"] == "allocate"
    ]
    assert sum(row["num_blocks"] for row in allocated) == 3


def test_fork_writes_nothing_of_its_parents(model: Path, tmp_path: Path) -> None:
    """The child goes on with the same scheduler, and then makes one of its own."""
    clock = Clock()
    with hooks_only(tmp_path, clock, name=found(tmp_path, clock)):
        scheduler = build_scheduler(model, BLOCKS)
        workload = arrivals()
        transcript(scheduler, workload[:10])
        wait_until_written()
        session = only_session(tmp_path)
        size = journal_of(session).stat().st_size

        def fork(say: Say) -> None:
            with said() as lines:
                transcript(scheduler, [(0, request) for _, request in workload[10:20]])
                say(hooked(scheduler))
                say(journal_of(session).stat().st_size)
                own = build_scheduler(model, BLOCKS)
                transcript(own, [(0, request) for _, request in workload[20:30]])
            say(lines)

        child = Child(fork)
        assert list(child.rest()) == [[], size, []]
        assert child.end() == 0
        transcript(scheduler, [(0, request) for _, request in workload[10:]])
    own_session = tmp_path / f"{session.name}_2"
    assert sorted(tmp_path.glob("session_*")) == [session, own_session]
    for folder, requests in ((session, 40), (own_session, 10)):
        collector.finalize(folder)
        tables = Tables(folder)
        assert len(tables.requests()) == requests
        assert tables.metadata["processes"][0]["ended"] == "exit"
        assert tables.metadata["complete"]


def test_finalize_on_a_full_disk_leaves_nothing_half_written(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """It says so in one line; with room it works."""
    record(model, tmp_path)
    session = only_session(tmp_path)

    def finalize(say: Say) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
        try:
            collector.finalize(session)
        except SessionError as error:
            say(str(error))

    child = Child(finalize)
    (message,) = child.rest()
    assert child.end() == 0
    assert message.startswith(f"cannot complete {session}: File too large")
    assert "\n" not in message
    assert [path.name for path in session.iterdir()] == ["journal"]
    collector.finalize(session)
    assert Tables(session).bytes_of() == whole


def test_memory_of_a_recorder_that_lost_its_disk_stays_small() -> None:
    """What cannot be written is counted and let go."""
    fd = os.open("/dev/full", os.O_WRONLY)
    with said() as lines:
        lost = Recorder(fd, {"producer": "engine"}, "engine 0")
        for _ in range(100):
            for number in range(50):
                lost.keep((encode.blob, Op.GRAPH, number, number, b"x" * 1_000))
            lost.flush()
            assert not lost.has_news
            assert not lost.waiting
        lost.close()
    assert lost.dropped == 5_000
    assert len(lines) == 1
