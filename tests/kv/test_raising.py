# SPDX-License-Identifier: Apache-2.0
"""Whatever is raised wherever the events are written, nothing is lost without being counted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from profilemate.format.events import Columns, Op
from profilemate.format.journal import Kind
from profilemate.record import encode, journal_writer, output, recorder
from profilemate.record.journal_writer import JournalWriter
from profilemate.record.output import Output
from profilemate.record.recorder import Recorder
from profilemate.record.writer import Writer
from tests.kv.children import said
from tests.kv.test_writer import frames_of, read
from tests.support.faults import Lines, Place, tracebacks

STEPS = 12
PAUSE_SEC = 0.001

OTHERS: list[Callable[[], BaseException]] = [
    lambda: RecursionError("too deep"),
    lambda: SystemExit(3),
    KeyboardInterrupt,
]


def is_written(frame: FrameType) -> bool:
    """Whether this is the code that brings events into the journal."""
    name = frame.f_code.co_filename
    return "/profilemate/record/" in name or name.endswith("/format/journal.py")


@dataclass(frozen=True)
class Ran:
    """What came of a recorder's life.

    ``numbers`` are those of the events in the journal, ``frames`` its other frames but the header,
    ``words`` the lines on stderr.
    """

    numbers: list[int]
    dropped: int
    words: list[str]
    frames: list[tuple[Kind, dict[str, Any]]]


def run(
    folder: Path,
    lines: Lines,
    in_the_midst: Callable[[pytest.MonkeyPatch], None] = lambda patch: None,
) -> Ran:
    """A recorder's life, with steps in several frames, a change, and its end."""
    path = folder / f"{time.monotonic_ns()}.journal"
    with pytest.MonkeyPatch.context() as patch, tracebacks() as shown, said() as words:
        # Frames are small, and each is followed by the costs so far.
        patch.setattr(output, "STATUS_NS", 0)
        patch.setattr(recorder, "EVENTS_IN_FRAME", 6)
        patch.setattr(recorder, "_writer", Writer())
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        opened = Recorder(fd, {"producer": "engine"}, "engine 0", PAUSE_SEC, path)
        with lines.watched(threads=True):
            for number in range(STEPS):
                opened.keep((encode.once, Op.RESET, time.monotonic_ns(), (2 * number,)))
                opened.keep((encode.once, Op.RESET, time.monotonic_ns(), (2 * number + 1,)))
                opened.step_ended()
                if number == 4:
                    wait_a_while(opened)
                    opened.status(methods=["a"])
                    in_the_midst(patch)
            wait_a_while(opened)
            opened.close()
    frames = [(kind, json.loads(data)) for kind, data, _ in read(path) if kind >= Kind.STATUS]
    numbers = [number for frame in frames_of(path) for number in frame]
    return Ran(numbers, opened.dropped, shown + words, frames)


def wait_a_while(opened: Recorder) -> None:
    """Wait for all to be written. A thread that has ended is begun anew with the next step only."""
    give_up = time.monotonic() + 0.1
    while opened.waiting and time.monotonic() < give_up:
        time.sleep(0.001)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Place]:
    """The lines that run in the thread."""
    lines = Lines(is_written)
    ran = run(tmp_path_factory.mktemp("places"), lines)
    assert ran.numbers == list(range(2 * STEPS))
    assert (ran.dropped, ran.words) == (0, [])
    files = {Path(name).name for name, _ in lines.seen}
    ours = ("encode", "journal", "journal_writer", "output", "recorder", "writer")
    assert files == {f"{name}.py" for name in ours}
    return sorted(lines.seen)


def check(ran: Ran, about: Any) -> None:
    """What is lost is counted, said once, and written into the journal."""
    assert ran.numbers == sorted(set(ran.numbers)), about
    assert len(ran.numbers) + ran.dropped == 2 * STEPS, about
    assert len(ran.words) <= 1, (about, ran.words)
    kind, ending = ran.frames[-1]
    assert kind is Kind.END, about
    has_failed = any(frame.get("failed") for _, frame in ran.frames)
    assert has_failed == bool(ran.words), (about, ran.words)
    assert has_failed or not ran.dropped, about
    assert has_failed or ending["dropped_events"] == 0, about


@pytest.mark.parametrize("which", range(len(OTHERS) + 1))
def test_an_error_at_any_line_that_writes(places: list[Place], tmp_path: Path, which: int) -> None:
    """No memory at any of them, and each other error at some: it tries again."""
    error, some = (
        (MemoryError, places) if which == len(OTHERS) else (OTHERS[which], places[which::9])
    )
    for place in some:
        lines = Lines(is_written, error, place=place)
        check(run(tmp_path, lines), place)
        assert lines.raised == place


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Columns, "pack"),
        (JournalWriter, "append"),
        (JournalWriter, "settle"),
        (journal_writer, "identity"),
        (output, "_json"),
        (Output, "write"),
        (Output, "status"),
        (Output, "settle"),
        (Output, "end"),
        (Recorder, "_end_of_frame"),
        (Recorder, "_take_out"),
        (Recorder, "fail"),
        (recorder, "say"),
    ],
)
@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_an_error_that_comes_again(
    tmp_path: Path, owner: Any, name: str, error: type[Exception]
) -> None:
    """The recording stops, if need be without a word in the journal, but never vLLM."""

    def fails(*_: Any, **__: Any) -> Any:
        raise error("as often as it is tried")

    ran = run(tmp_path, Lines(is_written), lambda patch: patch.setattr(owner, name, fails))
    assert ran.numbers == sorted(set(ran.numbers))
    assert len(ran.words) <= 1
    if ran.frames and ran.frames[-1][0] is Kind.END:
        missing = 2 * STEPS - len(ran.numbers)
        assert not missing or any(frame.get("failed") for _, frame in ran.frames)
