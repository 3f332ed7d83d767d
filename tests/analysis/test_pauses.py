# SPDX-License-Identifier: Apache-2.0
"""Which period of a recording is looked at, and what the user marked."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, series, summarize
from analysis.renderers.html.page import sections_of
from analysis.renderers.html.report import Report
from analysis.tables.pauses import Period, paused_now, period
from profilemate.format.errors import unreadable
from profilemate.format.marks import LONGEST_TEXT, MOST_MARKS
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.stories import swept


@pytest.fixture
def used(session: SessionBuilder) -> SessionBuilder:
    """A session that has ended."""
    swept(session)
    return session


def metadata(**pauses: list[list[float | None]]) -> dict[str, Any]:
    """By process, such as ``engine0``."""
    return {
        "processes": [
            {"role": name[:-1], "rank": int(name[-1]), "pauses": times}
            for name, times in pauses.items()
        ]
    }


def test_never_paused() -> None:
    assert period(metadata(engine0=[])) is None
    assert period({}) is None
    assert period(metadata(), 1) is None


def test_the_last_period_is_taken() -> None:
    known = metadata(engine0=[[1.0, 2.0], [5.0, 6.0]])
    assert period(known) == Period(3, 3, 6.0, None, {0: 6.0}, 2.0)
    assert period(known, 2) == Period(2, 3, 2.0, 5.0, {0: 2.0}, 2.0)
    assert period(known, 1) == Period(1, 3, 0.0, 1.0, {}, 2.0)


def test_a_recording_that_stands_still() -> None:
    known = metadata(engine0=[[1.0, 2.0], [5.0, None]])
    assert period(known) == Period(2, 2, 2.0, 5.0, {0: 2.0}, 1.0)
    assert paused_now(known) == ["engine 0"]


def test_processes_pause_one_after_the_other() -> None:
    """What all of them recorded counts; each engine's own last pause decides what it knows."""
    known = metadata(
        engine0=[[1.0, 2.0], [5.0, 6.0]], engine1=[[1.2, 2.3]], worker0=[[1.1, 2.4], [5.5, 6.5]]
    )
    assert period(known) == Period(3, 3, 6.5, None, {0: 6.0, 1: 2.3}, 2.9)
    assert period(known, 2) == Period(2, 3, 2.4, 5.0, {0: 2.0, 1: 2.3}, 2.9)


@pytest.mark.parametrize(
    "odd", [None, 3, "x", [3], [["x", 2.0]], [[]], [[-1.0, 2.0]], [[float("nan"), 1.0]], {}]
)
def test_odd_pauses_are_none(odd: object) -> None:
    assert period(metadata(engine0=odd)) is None  # type: ignore[arg-type]


def marked(folder: Path, *lines: object) -> None:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (folder / "marks.jsonl").write_text(text)


def test_marks_are_shown(used: SessionBuilder) -> None:
    marked(
        used.folder,
        {"timestamp_sec": 2.5, "text": "second"},
        {"timestamp_sec": 0.5, "text": "first \x1b[31m"},
        "torn {",
        [1],
        {"timestamp_sec": "x", "text": "no time"},
        {"timestamp_sec": 1.0},
    )
    found = json.loads(invoke("summary", used.folder, "--json").stdout)
    assert [mark["at_sec"] for mark in found["session"]["marks"]] == [0.5, 2.5]
    shown = invoke("summary", "--full", used.folder).stdout
    assert "Marks" in shown
    assert "2.50 s second" in " ".join(shown.split())
    assert "\x1b" not in shown


def test_after_a_mark(used: SessionBuilder) -> None:
    marked(used.folder, *({"timestamp_sec": at, "text": "v2"} for at in (0.001, 0.002)))
    found = json.loads(invoke("summary", used.folder, "--json", "--after", "v2").stdout)
    assert found["session"]["begin_sec"] == 0.002
    result = invoke("summary", used.folder, "--after", "v3")
    assert (result.returncode, result.stdout) == (2, "")
    assert "has no mark 'v3'" in result.stderr
    assert "it has 'v2'" in result.stderr


@pytest.mark.parametrize("slip", ["3x", "1.5 days", "", " ", "-2", "..5", "2 m m"])
def test_a_slip_is_one_line(used: SessionBuilder, slip: str) -> None:
    result = invoke("summary", used.folder, "--after", slip)
    assert result.returncode == 2
    assert "is not a time" in result.stderr or "that is no time; it has none" in result.stderr


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("2nd deployment", "2nd deployment"),
        ("2026-12-01 v3", "2026-12-01 v3"),
        ("+1 replica", "+1 replica"),
        (".env", ".env"),
        ("two lines", " two\nlines "),
    ],
)
def test_every_text_that_a_mark_can_have_is_found(
    used: SessionBuilder, text: str, asked: str
) -> None:
    marked(used.folder, {"timestamp_sec": 0.002, "text": text})
    found = json.loads(invoke("summary", used.folder, "--json", "--after", asked).stdout)
    assert found["session"]["begin_sec"] == 0.002


@pytest.mark.parametrize("time", ["30s", "5", " 1.5 h "])
def test_a_time_is_no_text_of_a_mark(used: SessionBuilder, time: str) -> None:
    """``--after`` takes it for a time, so nobody could ask for the mark."""
    result = invoke("mark", time, used.folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert f"{time.strip()!r} is a time" in result.stderr


@pytest.mark.parametrize("command", ["pause", "resume", "mark"])
def test_what_has_ended_cannot_be_asked(used: SessionBuilder, command: str) -> None:
    text = ["now"] if command == "mark" else []
    result = invoke(command, *text, used.folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "has ended: nothing records it any more" in result.stderr


def test_nobody_has_written_since(tmp_path: Path) -> None:
    """A metadata.json of before says nothing of what a process does now."""
    from tests.collector.journals import EngineJournal

    journal = EngineJournal(tmp_path)
    process = {"role": "engine", "rank": 0, "ended": "running", "pauses": []}
    path = journal.folder / "metadata.json"
    path.write_text(json.dumps({"format_version": 1, "processes": [process]}))
    os.utime(path, (1e9, 1e9))
    result = invoke("resume", journal.folder, "--wait", "0.2s")
    assert (result.returncode, result.stdout) == (0, "")
    assert "its collector may be gone" in " ".join(result.stderr.split())
    assert json.loads((journal.folder / "journal" / "control.json").read_text()) == {
        "paused": False
    }
    os.utime(path, (1e11, 1e11))
    result = invoke("resume", journal.folder, "--wait", "0.2s")
    assert (result.stdout, result.stderr) == ("engine 0 records\n", "")
    result = invoke("pause", journal.folder, "--wait", "0.2s")
    assert (result.returncode, result.stdout) == (0, "")
    assert "engine 0: not yet; an engine does so" in " ".join(result.stderr.split())
    journal.recorder.close()


@pytest.mark.parametrize("text", ["", "  ", "x" * (LONGEST_TEXT + 1), "a\x00b", "\x1b[1m"])
def test_texts_that_are_no_mark(used: SessionBuilder, text: str) -> None:
    result = invoke("mark", text, used.folder)
    assert result.returncode == 2
    assert "a mark is a text of 1 to 200 printable characters" in result.stderr
    assert not (used.folder / "marks.jsonl").exists()


def test_a_running_session_takes_so_many_marks(tmp_path: Path) -> None:
    from tests.collector.journals import EngineJournal

    journal = EngineJournal(tmp_path)
    session = journal.folder
    assert invoke("mark", "first", session).returncode == 0
    marked(session, *({"timestamp_sec": 1.0, "text": "x"} for _ in range(MOST_MARKS)))
    result = invoke("mark", "one more", session)
    assert result.returncode == 2
    assert "has 1,000 marks, and takes no more" in result.stderr
    assert (session / "marks.jsonl").stat().st_mode & 0o777 in (0o600, 0o644)
    journal.recorder.close()


def test_charts_over_time_have_a_line_at_each_mark(used: SessionBuilder) -> None:
    marked(
        used.folder,
        {"timestamp_sec": 2.5, "text": "<b>bold</b> & much more than fits beside it"},
        {"timestamp_sec": 0.5, "text": "in the warm-up"},
    )
    session = open_session(used.folder, after_sec=1.0)
    summary = summarize(session)
    report = Report(summary, series.measure(session, summary))
    drawn = 0
    for chart in (chart for section in sections_of(report) for chart in section.charts):
        if not isinstance(chart.figure, dict):
            continue
        layout = chart.figure["layout"]
        lines = [
            each["x0"] for each in layout.get("shapes", ()) if each.get("line", {}).get("dash")
        ]
        texts = [each["text"] for each in layout.get("annotations", ())]
        assert (2.5 in lines) is chart.over_time
        assert 0.5 not in lines
        if chart.over_time:
            drawn += 1
            assert "&lt;b&gt;bold&lt;/b&gt; &amp; much more tha..." in texts
    assert drawn > 2


@pytest.fixture
def running(used: SessionBuilder) -> SessionBuilder:
    """A session that is being recorded, as far as its folder tells."""
    (used.folder / "journal").mkdir(mode=0o700)
    return used


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_recording_that_has_ended_is_not_said_to_go_on(
    running: SessionBuilder, command: str
) -> None:
    """Its engine runs, and has no journal any more."""
    why = "No space left on device"
    engine = {"role": "engine", "rank": 0, "ended": "running", "hooks_failed": {"journal": why}}
    running.metadata(complete=False, processes=[engine])
    # As if it were written from now on.
    os.utime(running.folder / "metadata.json", (1e11, 1e11))
    result = invoke(command, running.folder, "--wait", "5s")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == (
        f"profilemate: engine 0: its recording has ended ({why}); it records nothing any more\n"
    )


def test_a_disk_without_room_is_not_one_that_cannot_be_read() -> None:
    for number, verb in ((errno.ENOSPC, "write"), (errno.EROFS, "write"), (errno.EIO, "read")):
        said = str(unreadable(Path("session"), OSError(number, "why")))
        assert said == f"cannot {verb} session: why"
