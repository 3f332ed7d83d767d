# SPDX-License-Identifier: Apache-2.0
"""The thread that packs and writes: vLLM never waits for it, and nothing is lost by it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from profilemate.collector.decode import Shape, episodes
from profilemate.collector.journal_reader import Frame, JournalReader
from profilemate.format.events import Op
from profilemate.format.journal import Kind
from profilemate.hooks.kv import requests
from profilemate.record import encode, recorder, writer
from profilemate.record.recorder import Recorder
from profilemate.record.writer import Writer
from tests.kv.children import said
from tests.kv.recording import (
    Tables,
    hooks_only,
    make_tables,
    only_session,
    wait_until_written,
)
from tests.kv.transcript import arrivals, transcript
from tests.support.scheduler import RequestMaker, build_scheduler, tokens

BLOCKS = 60
PATIENCE_SEC = 60

JournalAt = tuple[Recorder, Path]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JournalAt]:
    """A recorder with a thread of its own, and where its journal is."""
    monkeypatch.setattr(recorder, "_writer", Writer())
    path = tmp_path / "engine0.journal"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    opened = Recorder(fd, {"producer": "engine"}, "engine 0")
    yield opened, path
    opened.close()


def keep_step(into: Recorder, number: int) -> None:
    """A step of one event, and its end."""
    into.keep((encode.once, Op.RESET, time.monotonic_ns(), (number,)))
    into.step_ended()


def contents(path: Path) -> tuple[list[int], list[Kind]]:
    """The numbers of the steps in a journal, and the kinds of its frames."""
    numbers = [number for frame in frames_of(path) for number in frame]
    return numbers, [kind for kind, _, _ in read(path)]


def frames_of(path: Path) -> list[list[int]]:
    """The numbers in each frame of events."""
    return [
        [
            event[-1]
            for episode in episodes(payload, Shape(1, 1), lambda _: [])
            for event in episode.events
        ]
        for kind, payload, _ in read(path)
        if kind is Kind.EVENTS
    ]


def read(path: Path) -> list[Frame]:
    """The frames of a journal."""
    reader = JournalReader(path)
    frames = []
    while more := reader.read():
        frames += more
    reader.close()
    return frames


def wait_for(condition: Any) -> None:
    """Wait until this is so."""
    give_up = time.monotonic() + PATIENCE_SEC
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def writer_thread() -> threading.Thread:
    """The one that writes."""
    thread = recorder._writer._thread
    assert thread is not None
    return thread


def test_steps_are_written_without_being_asked(journal: JournalAt) -> None:
    """After a pause, too, in which the thread has gone to sleep."""
    opened, path = journal
    for number in range(3):
        keep_step(opened, number)
        wait_until_written()
        assert contents(path)[0] == list(range(number + 1))
        wait_for(lambda: recorder._writer.is_idle)


def test_half_a_step_is_not_written(journal: JournalAt) -> None:
    opened, path = journal
    keep_step(opened, 1)
    opened.keep((encode.once, Op.RESET, time.monotonic_ns(), (2,)))
    wait_until_written()
    wait_for(lambda: recorder._writer.is_idle)
    assert contents(path)[0] == [1]
    opened.step_ended()
    wait_until_written()
    assert contents(path)[0] == [1, 2]


def test_many_steps_while_it_writes(journal: JournalAt) -> None:
    """None is lost, written twice or out of order between the two threads."""
    opened, path = journal
    for number in range(50_000):
        keep_step(opened, number)
        if number % 10_000 == 0:
            wait_until_written()
    wait_until_written()
    assert contents(path)[0] == list(range(50_000))


def test_a_step_longer_than_a_frame(journal: JournalAt, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one frame, as it is one episode; shorter ones are divided between steps."""
    opened, path = journal
    monkeypatch.setattr(recorder, "EVENTS_IN_FRAME", 10)
    for events in (25, 3, 3, 3, 12):
        for number in range(events):
            opened.keep((encode.once, Op.RESET, time.monotonic_ns(), (number,)))
        opened._events.append(None)
    opened.flush()
    sizes = [len(frame) for frame in frames_of(path)]
    assert sizes == [25, 6, 3, 12]
    assert contents(path)[0] == [number for frame in (25, 3, 3, 3, 12) for number in range(frame)]


def test_it_holds_back_where_vllm_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that became longer, since the GIL was not free, is followed by longer ones."""
    late = iter([0.0, 0.006, 0.006, 0.006, 0.006, 0.006, 0.0, 0.0])
    now, pauses = 0.0, []

    def get(timeout: float) -> None:
        nonlocal now
        pauses.append(timeout)
        now += timeout + next(late)
        raise Empty

    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now))
    written = iter([True] * 7 + [False, False])
    waiting = Writer()
    waiting.sources.append(SimpleNamespace(write=lambda: next(written)))
    waiting._bell = SimpleNamespace(get=get)  # type: ignore[assignment]
    waiting.pause_sec = 0.01
    waiting._write_until_idle()
    assert pauses == [0.01, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.01]
    assert waiting.is_idle


def test_it_takes_no_signal(journal: JournalAt) -> None:
    """Signals are for vLLM: its main thread may wait in a call that a signal has to end."""
    keep_step(journal[0], 1)
    status = Path(f"/proc/self/task/{writer_thread().native_id}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
    blocked = int(mask, 16)
    assert all(
        blocked >> number - 1 & 1
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
    )
    assert writer_thread().daemon


def test_no_thread_can_be_had(journal: JournalAt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is reached: each step is written as it ends."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    opened, path = journal
    for number in range(3):
        keep_step(opened, number)
        assert contents(path)[0] == list(range(number + 1))


@pytest.mark.parametrize("times", [1, writer.ATTEMPTS])
def test_a_thread_that_ended_is_begun_anew(
    journal: JournalAt, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """By the next step; before it ends, it tries again by itself."""
    opened, path = journal
    endings = [SystemExit] * times
    write = opened.write

    def write_or_end() -> bool:
        if endings:
            raise endings.pop()
        return write()

    monkeypatch.setattr(opened, "write", write_or_end)
    keep_step(opened, 1)
    wait_for(lambda: not endings and recorder._writer.is_idle)
    assert contents(path)[0] == ([1] if times < writer.ATTEMPTS else [])
    keep_step(opened, 2)
    wait_until_written()
    assert contents(path)[0] == [1, 2]


def test_an_event_that_cannot_be_laid_out(model: Path, hooks_on: None, tmp_path: Path) -> None:
    """One line, from whatever thread; what was written before stays, and vLLM goes on."""
    with said() as lines, hooks_only(tmp_path):
        scheduler = build_scheduler(model, BLOCKS)
        (opened,) = recorder._living()
        transcript(scheduler, arrivals(3))
        wait_until_written()
        opened.keep((encode.once, Op.RESET, "no time", (1,)))
        # What comes after it may be laid out before the first is packed, and is as lost.
        results = transcript(scheduler, arrivals(9)[3:])
        wait_until_written()
        wait_for(lambda: not opened.active)
    assert sum(len(step[1]) for step in results) > 0
    (line,) = lines
    assert line.startswith("profilemate: engine 0: recording stopped, writing failed (")
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    assert len(tables.requests()) == 3
    metadata = tables.metadata
    assert not metadata["complete"]
    assert set(metadata["processes"][0]["hooks_failed"]) == {"writing"}


def test_a_hook_that_fails_beside_an_event_that_cannot_be_laid_out(
    journal: JournalAt,
) -> None:
    """Recording a loss never raises: that happens inside vLLM's calls."""
    opened, path = journal
    with said() as lines:
        opened.keep((encode.once, Op.RESET, "no time", (1,)))
        opened.lose(["requests"], "add_request", RuntimeError("as a hook may"))
        opened.step_ended()
        opened.close()
    assert lines[0].startswith("profilemate: engine 0: no longer recorded: requests.jsonl")
    assert "recording stopped, writing failed" in lines[1]
    assert contents(path)[1][-1] is Kind.END
    assert opened.dropped == 2


def test_garbage_is_collected_while_the_thread_begins(
    journal: JournalAt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The garbage may include a scheduler, whose end closes its recorder."""
    opened, path = journal
    other = tmp_path / "engine1.journal"
    garbage = Recorder(os.open(other, os.O_WRONLY | os.O_CREAT), {}, "engine 1")
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        keep_step(garbage, 1)
        garbage.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    keep_step(opened, 1)
    wait_until_written()
    assert contents(path)[0] == contents(other)[0] == [1]
    assert contents(other)[1][-1] is Kind.END


class Stuck:
    """A disk that does not answer until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free = threading.Event()
        self.calls = 0
        write = os.write

        def slow(fd: int, data: Any) -> int:
            self.calls += 1
            self._free.wait(PATIENCE_SEC)
            return write(fd, data)

        monkeypatch.setattr("profilemate.record.journal_writer.os.write", slow)

    def let_go(self) -> None:
        self._free.set()


def test_a_disk_that_does_not_answer(
    model: Path, hooks_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM goes on meanwhile; when the disk is back, nothing is missing."""
    with hooks_only(tmp_path):
        scheduler = build_scheduler(model, BLOCKS)
        disk = Stuck(monkeypatch)
        transcript(scheduler, arrivals())
        wait_for(lambda: disk.calls)
        disk.let_go()
        wait_until_written()
    tables: Tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    assert len(tables.requests()) == len(arrivals())
    assert tables.metadata["complete"]


def test_a_disk_that_does_not_answer_for_long(
    journal: JournalAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits has a limit; what is dropped is counted, and said when the disk is back.

    Nothing that a hook calls waits for the disk.
    """
    opened, path = journal
    opened._room = 1_000
    monkeypatch.setattr(writer, "STUCK_SEC", 0.0)
    disk = Stuck(monkeypatch)
    with said() as lines:
        keep_step(opened, 0)
        wait_for(lambda: disk.calls)
        for number in range(1, 5_000):
            keep_step(opened, number)
            assert len(opened._events) <= 1_001
        began = time.monotonic()
        opened.lose(["frees"], "free", RuntimeError("as a hook may"))
        assert time.monotonic() - began < recorder.PATIENCE_SEC / 2
        disk.let_go()
        wait_until_written()
        opened.close()
    line, _ = lines
    assert "1,001 events wait for it" in line
    numbers, kinds = contents(path)
    # What waited is written, the step that was being written included.
    assert numbers == list(range(500))
    # The loss of a part is an event, too.
    assert opened.dropped + len(numbers) == 5_001
    assert kinds[-1] is Kind.END


@pytest.mark.parametrize("what", ["ids", "tokens"])
def test_what_long_requests_hold_counts_while_it_waits(
    model: Path, hooks_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of the limit, an event takes what it takes of the memory."""
    monkeypatch.setattr(recorder, "MAX_WAITING", 5_000)
    monkeypatch.setattr(writer, "STUCK_SEC", 0.0)
    make = RequestMaker()
    with said() as lines, hooks_only(tmp_path):
        scheduler = build_scheduler(model, BLOCKS)
        (opened,) = recorder._living()
        disk = Stuck(monkeypatch)
        transcript(scheduler, [(0, make("short", tokens(1, 40), 3))])
        wait_for(lambda: disk.calls)
        assert opened.active
        if what == "tokens":
            monkeypatch.setattr(requests, "TOKEN_BYTES", 100_000)
        length = 2_000_000 if what == "ids" else 1
        transcript(scheduler, [(0, make("x" * length, tokens(2, 40), 3))])
        assert not opened.active
        disk.let_go()
    (line,) = lines
    assert "events wait for it" in line


def test_the_collector_of_garbage_ends_a_recording_in_the_midst_of_a_write(
    journal: JournalAt,
) -> None:
    """It is ended when that is done."""
    opened, path = journal

    def close(columns: Any, kept: Any) -> None:
        opened.close()
        encode.once(columns, kept)

    opened.keep((close, Op.RESET, time.monotonic_ns(), (1,)))
    keep_step(opened, 2)
    wait_for(lambda: contents(path)[1][-1] is Kind.END)
    numbers, kinds = contents(path)
    assert numbers == [1, 2]
    assert kinds.count(Kind.END) == 1


def test_an_end_does_not_wait_for_a_disk_forever(
    journal: JournalAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process can go; where it lives on, the journal ends when the disk is back."""
    opened, path = journal
    monkeypatch.setattr(recorder, "PATIENCE_SEC", 0.05)
    disk = Stuck(monkeypatch)
    keep_step(opened, 1)
    wait_for(lambda: disk.calls)
    keep_step(opened, 2)
    with said() as lines:
        opened.close()
    (line,) = lines
    assert line == (
        "profilemate: engine 0: the disk does not answer, 2 events are not written and are lost if "
        "the process ends now"
    )
    assert contents(path)[0] == []
    disk.let_go()
    wait_for(lambda: contents(path)[1][-1] is Kind.END)
    assert contents(path)[0] == [1, 2]


def test_several_ends_wait_for_a_disk_once(
    journal: JournalAt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine and its worker in one process do not wait one after the other. The disk hangs just
    when they end, and the thread that ends them does not."""
    first, _ = journal
    path = tmp_path / "worker0.journal"
    second = Recorder(os.open(path, os.O_WRONLY | os.O_CREAT), {}, "worker 0")
    monkeypatch.setattr(recorder, "PATIENCE_SEC", 0.5)
    disk = Stuck(monkeypatch)
    began = time.monotonic()
    with said() as lines:
        first.close()
        second.close()
    assert time.monotonic() - began < 0.8
    # No event is missing.
    assert lines == []
    disk.let_go()
    wait_for(lambda: not recorder._living())
    assert contents(path)[1] == contents(journal[1])[1] == [Kind.HEADER, Kind.END]


def test_a_slow_disk_at_the_end(journal: JournalAt, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it cannot take in time is lost, counted, and the journal says so."""
    opened, path = journal
    monkeypatch.setattr(recorder, "PATIENCE_SEC", 1.0)
    monkeypatch.setattr(recorder, "LAST_WORD_SEC", 0.7)
    monkeypatch.setattr(recorder, "EVENTS_IN_FRAME", 2)
    write = os.write

    def slow(fd: int, data: Any) -> int:
        time.sleep(0.1)
        return write(fd, data)

    for number in range(50):
        opened.keep((encode.once, Op.RESET, time.monotonic_ns(), (number,)))
        opened._events.append(None)
    monkeypatch.setattr("profilemate.record.journal_writer.os.write", slow)
    with said() as lines:
        opened.close()
    assert lines == []
    numbers, kinds = contents(path)
    assert numbers == list(range(len(numbers)))
    assert 0 < len(numbers) < 50
    assert kinds[-1] is Kind.END
    ending = [json.loads(frame.payload) for frame in read(path) if frame.kind >= Kind.STATUS]
    assert ending[-1]["dropped_events"] == opened.dropped == 50 - len(numbers)
    assert {"journal": "the disk was too slow to write all at the end"} in [
        frame.get("failed") for frame in ending
    ]
