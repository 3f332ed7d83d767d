# SPDX-License-Identifier: Apache-2.0
"""SIGKILL, of the engine's process or of the collector's: what was written is in the tables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilemate import collector
from profilemate.record import recorder
from tests.kv.children import Child, Say, processes_with, said
from tests.kv.recording import (
    TABLES,
    Clock,
    Tables,
    found,
    hooks_only,
    make_tables,
    only_session,
    wait_until_written,
)
from tests.support.scheduler import (
    RequestMaker,
    answer,
    build_scheduler,
    step,
    tokens,
    trace_requests,
)

pytestmark = pytest.mark.usefixtures("hooks_on")

REQUESTS = 250
STEP_US = 11_000
QUICK_LOSS_SEC = 0.1
"""What a kill may cost of steps that do not wait for a model, on a busy machine."""
PATIENCE_SEC = 120
ADMITTED = 100
"""Requests until the engine is asked to end."""


def run(
    model: Path,
    clock: Clock,
    say: Say = lambda words: None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Run part of the trace on a clock that stands still in a step; say each half step, and when.

    ``pause`` is for what an engine waits for: its model, and its clients.
    """
    scheduler = build_scheduler(model, 600)
    pending = [request for _, request in trace_requests(RequestMaker(), REQUESTS)][::-1]
    steps = 0
    while pending or scheduler.has_unfinished_requests():
        if pending:
            scheduler.add_request(pending.pop())
        clock.tick()
        output = scheduler.schedule()
        steps += 1
        pause()
        say(["scheduled", steps, time.monotonic()])
        clock.tick(STEP_US)
        scheduler.update_from_output(output, answer(scheduler, output))
        pause()
        say(["updated", steps, time.monotonic()])


@pytest.fixture(scope="module")
def whole(
    model: Path, hooks_on: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The tables of the story when nobody is killed."""
    folder = tmp_path_factory.mktemp("whole")
    clock = Clock()
    with hooks_only(folder, clock, name=found(folder, clock)):
        run(model, clock)
    return make_tables(only_session(folder), folder / "tables").bytes_of()


def run_and_kill(
    model: Path,
    folder: Path,
    steps: int,
    *,
    with_collector: bool = False,
    pause: Callable[[], None] = wait_until_written,
) -> list[float]:
    """Kill an engine that has come so far; returns when each of its steps ended."""

    def engine(say: Say) -> None:
        clock = Clock()
        name = found(folder, clock)
        with hooks_only(folder, clock, name=name, collector=with_collector):
            run(model, clock, say, pause)

    child = Child(engine)
    ended: list[float] = []
    while len(ended) < steps:
        ended += ended_by(child.next())
    child.kill()
    for message in child.rest():
        ended += ended_by(message)
    assert child.end() == -signal.SIGKILL
    return ended


def ended_by(message: list[Any]) -> list[float]:
    """When the step ended, if this is the end of one."""
    what, _, when = message
    return [when] if what == "updated" else []


def check(tables: Tables, whole: dict[str, bytes], last_step: int) -> None:
    """Everything up to the last step that ended is there, as without the kill."""
    contents = tables.bytes_of()
    for table in contents:
        assert whole[table].startswith(settled(table, contents)), table
    steps = tables.rows("scheduler_steps.csv")
    assert sum(row["repeats"] for row in steps) in (last_step, last_step + 1)
    metadata = tables.metadata
    assert metadata["complete"]
    (process,) = metadata["processes"]
    assert (process["ended"], process["mismatches"]) == ("killed", 0)


CLOSED_AT_ONCE = (
    "kv_cache_usage.csv",
    "kv_cache_allocations.csv",
    "kv_cache_evictions.csv",
    "requests.jsonl",
)


def settled(table: str, contents: dict[str, bytes], *, unwound: bool = False) -> bytes:
    """The rows that are as they would be had nobody sent a signal.

    Not the last one, where the table's rows are open: it counts less than it would have. And where
    an exception ended a step half-way, none of that step, which are those of the last moment.
    """
    rows = contents[table].splitlines(keepends=True)
    if unwound:
        last = max(map(_times, contents.values()), key=lambda times: times[-1])[-1]
        rows = [row for row, time in zip(rows, _times(contents[table]), strict=True) if time < last]
    if table not in CLOSED_AT_ONCE:
        rows = rows[:-1]
    return b"".join(rows)


def _times(content: bytes) -> list[float]:
    """When each row was written; a header before all others."""
    rows = content.splitlines()
    if content.startswith(b"{"):
        return [json.loads(row)["finish_sec"] for row in rows]
    return [-1.0, *(float(row.partition(b",")[0]) for row in rows[1:])]


@pytest.mark.parametrize("steps", [1, 60, 170])
def test_engine_killed(model: Path, tmp_path: Path, whole: dict[str, bytes], steps: int) -> None:
    """There is no collector; ``finalize`` makes the tables."""
    ended = run_and_kill(model, tmp_path, steps)
    session = only_session(tmp_path)
    collector.finalize(session)
    check(Tables(session), whole, len(ended))


def test_engine_killed_in_quick_steps(model: Path, tmp_path: Path) -> None:
    """An engine that waits for nothing: the last steps may be lost, and only those."""
    ended = run_and_kill(model, tmp_path, 100, pause=lambda: None)
    session = only_session(tmp_path)
    collector.finalize(session)
    tables = Tables(session)
    steps = sum(row["repeats"] for row in tables.rows("scheduler_steps.csv"))
    lost = ended[steps:]
    assert all(ended[-1] - when < QUICK_LOSS_SEC for when in lost)
    assert tables.metadata["complete"]
    assert tables.metadata["processes"][0]["mismatches"] == 0


def test_engine_asked_to_end_in_a_step(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """vLLM's engines answer SIGTERM with SystemExit, wherever they are. Here it is half-way through
    a step that has allocated blocks."""

    def engine(say: Say) -> None:
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue

        admit, admissions = FCFSRequestQueue.pop_request, iter(range(ADMITTED))

        def admit_or_end(queue: Any) -> Any:
            if next(admissions, None) is None:
                sys.exit(1)
            return admit(queue)

        FCFSRequestQueue.pop_request = admit_or_end
        clock = Clock()
        with hooks_only(tmp_path, clock, name=found(tmp_path, clock)):
            run(model, clock, say)

    child = Child(engine)
    ended = [when for message in child.rest() for when in ended_by(message)]
    assert child.end() == 1
    session = only_session(tmp_path)
    collector.finalize(session)
    tables = Tables(session)
    contents = tables.bytes_of()
    for table in contents:
        assert whole[table].startswith(settled(table, contents)), table
    assert sum(row["repeats"] for row in tables.rows("scheduler_steps.csv")) == len(ended) > 50
    (process,) = tables.metadata["processes"]
    assert tables.metadata["complete"]
    assert (process["ended"], process["mismatches"]) == ("exit", 0)


def test_engine_killed_beside_its_collector(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The collector sees that the process is gone, completes the tables and goes, too."""
    ended = run_and_kill(model, tmp_path, 120, with_collector=True)
    session = only_session(tmp_path)
    wait_until_gone(session / "journal")
    check(Tables(session), whole, len(ended))
    left = sorted(path.name for path in session.iterdir())
    assert left == sorted([*TABLES, "kv_cache_summary.txt", "metadata.json", "totals.json"])
    while processes_with(session):
        time.sleep(0.05)


def test_collector_killed(model: Path, tmp_path: Path) -> None:
    """The engine goes on and its events are kept; ``finalize`` makes the tables anew."""
    scheduler_steps = 0
    with hooks_only(tmp_path, collector=True):
        scheduler = build_scheduler(model, 600)
        session = only_session(tmp_path)
        pending = [request for _, request in trace_requests(RequestMaker(), 120)][::-1]
        while pending or scheduler.has_unfinished_requests():
            if pending:
                scheduler.add_request(pending.pop())
            output = scheduler.schedule()
            scheduler.update_from_output(output, answer(scheduler, output))
            scheduler_steps += 1
            if scheduler_steps == 60:
                kill_collector(session)
        recorder.close_all()
    assert (session / "journal").is_dir()
    copy = tmp_path / "copy"
    shutil.copytree(session, copy)
    expected = make_tables(copy, tmp_path / "expected")
    collector.finalize(session)
    assert Tables(session).bytes_of() == expected.bytes_of()
    steps = Tables(session).rows("scheduler_steps.csv")
    assert sum(row["repeats"] for row in steps) == scheduler_steps
    assert Tables(session).metadata["complete"]


def kill_collector(session: Path) -> None:
    """Wait for the first rows, and kill who wrote them."""
    wait_until(session / "kv_cache_usage.csv")
    (pid,) = processes_with(session)
    os.kill(pid, signal.SIGKILL)
    while processes_with(session):
        time.sleep(0.05)


def wait_until(path: Path) -> None:
    """Wait for the file to be there."""
    give_up = time.monotonic() + PATIENCE_SEC
    while not path.exists():
        assert time.monotonic() < give_up, f"{path} did not come"
        time.sleep(0.05)


def wait_until_gone(path: Path) -> None:
    """Wait for the folder to be gone."""
    give_up = time.monotonic() + PATIENCE_SEC
    while path.exists():
        assert time.monotonic() < give_up, f"{path} is still there"
        time.sleep(0.05)


def test_an_engine_that_goes_on_after_half_a_step(model: Path, tmp_path: Path) -> None:
    """Recording stops with a line: vLLM's blocks are no longer those that the tables know."""
    with said() as lines, hooks_only(tmp_path):
        scheduler = build_scheduler(model, 600)
        make = RequestMaker()
        scheduler.add_request(make("first", tokens(1, 64), 8))
        step(scheduler)
        with pytest.MonkeyPatch.context() as patch:
            queue = type(scheduler.waiting)
            patch.setattr(queue, "peek_request", lambda queue: {}["no such request"])
            scheduler.add_request(make("second", tokens(2, 64), 8))
            with pytest.raises(KeyError):
                scheduler.schedule()
        for _ in range(3):
            step(scheduler)
    (line,) = lines
    assert "recording stopped, schedule failed" in line
    collector.finalize(only_session(tmp_path))
    tables = Tables(only_session(tmp_path))
    assert sum(row["repeats"] for row in tables.rows("scheduler_steps.csv")) == 1
    assert [process["problem"] for process in tables.metadata["processes"]] == [None]
