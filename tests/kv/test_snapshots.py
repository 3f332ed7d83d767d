# SPDX-License-Identifier: Apache-2.0
"""Snapshots that a session's collector takes by itself, of vLLM's real scheduler."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session
from profilemate.collector import rotation, snapshots
from profilemate.collector.__main__ import main as collect
from profilemate.collector.follower import Follower
from profilemate.collector.rotation import Rotation
from profilemate.collector.snapshots import Snapshots
from profilemate.commands.snapshot_folder import take
from profilemate.format import snapshot
from profilemate.format.keep import ALL, Keep
from profilemate.format.when import Limit
from profilemate.record import launch
from tests.analysis.test_segments import differences, said
from tests.kv.children import Child, Say, processes_with
from tests.kv.recording import Tables, hooks_only, only_session
from tests.kv.test_segments import (  # noqa: F401
    Recording,
    advance,
    begun,
    copied,
    end,
    recording,
    whole,
)
from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens
from tests.support.small_disk import mounted

pytestmark = pytest.mark.usefixtures("hooks_on")

PATIENCE_SEC = 120
BLOCKS = 24
MARK = b'{"timestamp_sec": 0.5, "text": "a mark"}\n'
WHEN, LIMIT, LAST = (
    *("VLLM_PROFILING_SNAPSHOT_WHEN", "VLLM_PROFILING_SNAPSHOT_LIMIT"),
    "VLLM_PROFILING_SNAPSHOT_LAST",
)
NAME = re.compile(r"session.*_snapshot_\d{8}_\d{6}Z")


def taken_of(session: Path) -> list[Path]:
    """The snapshots beside the session, the oldest first."""
    return sorted(path for path in session.parent.iterdir() if NAME.fullmatch(path.name))


def halves_of(session: Path) -> list[str]:
    return [path.name for path in session.parent.iterdir() if path.name.startswith(".")]


def metadata_of(session: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((session / "metadata.json").read_bytes())
    return content


def log_of(session: Path) -> dict[str, Any]:
    """What the session's metadata.json says of its snapshots."""
    with suppress(FileNotFoundError):
        content: dict[str, Any] = metadata_of(session)["snapshots"] or {}
        return content
    return {}


class Load:
    """Requests that outgrow the pool, in this process: some are preempted again and again."""

    def __init__(self, model: Path) -> None:
        self.scheduler = build_scheduler(model, BLOCKS, max_num_seqs=8)
        self._make = RequestMaker()
        self._made = 0

    def until(self, is_there: Callable[[], Any]) -> Any:
        give_up = time.monotonic() + PATIENCE_SEC
        while not (found := is_there()):
            assert time.monotonic() < give_up
            while len(self.scheduler.requests) < 8:
                self._made += 1
                prompt = tokens(self._made % 3, 40) + tokens(100 + self._made, 20)
                request = self._make(f"request {self._made}", prompt, 60)
                self.scheduler.add_request(request)
            step(self.scheduler)
            time.sleep(0.002)
        return found

    def rest(self, seconds: float) -> None:
        """Nothing runs for so long."""
        while self.scheduler.has_unfinished_requests():
            step(self.scheduler)
        time.sleep(seconds)


@contextmanager
def loaded(model: Path, sessions: Path, **variables: str) -> Iterator[tuple[Load, Path]]:
    """A load with a collector beside it, and its session."""
    with pytest.MonkeyPatch.context() as patch, hooks_only(sessions, collector=True):
        for name, value in variables.items():
            patch.setenv(name, value)
        load = Load(model)
        load.until(lambda: list(sessions.glob("session_*")))
        yield load, only_session(sessions)


def wait_until_complete(session: Path) -> None:
    give_up = time.monotonic() + PATIENCE_SEC
    while (session / "journal").exists() or processes_with(session):
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_preemptions_take_one(model: Path, tmp_path: Path) -> None:
    """It has the rows that the session has up to there, and is a session by itself."""
    when = {WHEN: "preemptions > 3/2s or usage<0%/1h", LIMIT: "1", LAST: "1s"}
    with loaded(model, tmp_path, **when) as (load, session):
        (session / "marks.jsonl").write_bytes(MARK)
        load.until(lambda: log_of(session).get("taken"))
        # Once more: only one is allowed.
        load.rest(3.5)
        load.until(lambda: log_of(session)["left_out"])
    wait_until_complete(session)
    (path,) = taken_of(session)
    log = log_of(session)
    (taken,) = log["taken"]
    assert taken["name"] == path.name
    assert (log["failed"], log["problem"]) == (0, None)
    assert log["left_out"] >= 1
    assert log["when"] == "preemptions>3/2s or usage<0%/1h"
    assert halves_of(session) == []

    # The reason is what the tables say of those two seconds.
    count = int(re.fullmatch(r"preemptions>3/2s: (\d+) on engine 0", taken["reason"])[1])  # type: ignore[index]
    rows, of_snapshot = whole(session), whole(path)
    steps = rows["scheduler_steps.csv"].decode().splitlines()[1:]
    cells = [line.split(",") for line in steps]
    ends = range(3, int(taken["at_sec"]) + 1)
    counts = [sum(int(row[8]) for row in cells if end - 2 < float(row[0]) <= end) for end in ends]
    assert counts[-1] == count > 3
    assert all(earlier <= 3 for earlier in counts[:-1])

    assert (path / "marks.jsonl").read_bytes() == MARK
    assert set(of_snapshot) == set(rows) - {"cuda_graph_usage.csv"}
    for table, data in of_snapshot.items():
        assert rows[table].startswith(data)
        assert len(rows[table]) > len(data) > 200
    check_it_is_a_session(path, session, taken)


def check_it_is_a_session(path: Path, session: Path, taken: dict[str, Any]) -> None:
    said_of_it = metadata_of(path)["snapshot"]
    assert said_of_it["of"] == session.name
    assert said_of_it["reason"] == taken["reason"]
    assert said_of_it["was_running"] is True
    assert "snapshots" not in metadata_of(path)
    opened = open_session(path)
    assert (opened.state, opened.goes_on) == ("complete", True)
    assert opened.note is not None
    assert opened.note.endswith(f"({taken['reason']})")
    assert opened.end_sec <= taken["at_sec"] + 1e-6
    # Totals and tables are of one moment, and no row of the open segment is there. On a busy
    # machine that may be within a step: its first events are counted then, and have no row yet.
    until_sec = json.loads((path / "totals.json").read_bytes())["until_ns"] / 1e9
    assert opened.end_sec - 1e-6 <= until_sec <= taken["at_sec"] + 1e-6
    assert [each.name for each in path.glob("*.csv")] == []
    assert said(path)["warnings"] == []
    for each in (path, *path.rglob("*")):
        assert each.stat().st_mode & 0o777 == (0o700 if each.is_dir() else 0o600)


def test_a_signal_takes_one_whatever_the_limit(model: Path, tmp_path: Path) -> None:
    """The second has only what came since the first, as far as it goes back."""
    with loaded(model, tmp_path, **{LIMIT: "1,1h", LAST: "1s"}) as (load, session):
        assert log_of(session) == {}
        for number in (1, 2):
            load.until((session / "scheduler_steps.csv").exists)
            (process,) = processes_with(session)
            for _ in range(3):
                os.kill(process, signal.SIGUSR2)
            load.until(lambda: len(log_of(session).get("taken", [])) >= number)  # noqa: B023
            begun_at = time.monotonic()
            load.until(lambda: time.monotonic() > begun_at + 1.5)  # noqa: B023
    wait_until_complete(session)
    log = log_of(session)
    assert (log["left_out"], log["failed"], log["when"]) == (0, 0, None)
    paths = taken_of(session)
    assert [each["name"] for each in log["taken"]] == [path.name for path in paths]
    assert {each["reason"] for each in log["taken"]} == {"SIGUSR2"}
    # What came while one was on its way is one more, at most.
    assert 2 <= len(paths) <= 4
    last = paths[-1]
    numbers = sorted(path.name for path in (last / "segments").iterdir())
    assert "0001" not in numbers
    window = open_session(last).window
    assert window is not None
    assert window.removed_segments == int(numbers[0]) - 1
    for number in numbers:
        for path in (last / "segments" / number).iterdir():
            assert os.path.samefile(path, session / path.relative_to(last))
    index = json.loads((last / "segments" / numbers[0] / "segment.json").read_bytes())
    found = said(last)
    assert found["session"]["begin_sec"] == index["begin_sec"] == window.begin_sec
    assert log["taken"][-1]["at_sec"] - index["begin_sec"] >= 1


def test_an_engine_that_crashes(model: Path, tmp_path: Path) -> None:
    """It is the session's only one: the snapshot comes before the session is complete."""

    def run(say: Say) -> None:
        with loaded(model, tmp_path, **{WHEN: "crash"}) as (load, session):
            load.until((session / "scheduler_steps.csv").exists)
            begun_at = time.monotonic()
            load.until(lambda: time.monotonic() > begun_at + 2)
            say(str(session))
            load.until(lambda: False)

    child = Child(run)
    session = Path(child.next())
    child.kill()
    child.end()
    wait_until_complete(session)
    (path,) = taken_of(session)
    log = log_of(session)
    assert [each["reason"] for each in log["taken"]] == ["crash: engine 0 is gone"]
    check_it_is_a_session(path, session, log["taken"][0])
    assert metadata_of(session)["complete"]
    # All that the engine left is in it, but for rows that were open.
    assert whole(session)["scheduler_steps.csv"].startswith(whole(path)["scheduler_steps.csv"])
    end_sec = open_session(session).end_sec
    # One is rounded to microseconds, the other a difference of times since 1970.
    assert open_session(path).end_sec == pytest.approx(end_sec, abs=2e-6)


def test_an_engine_that_ends_has_not_crashed(model: Path, tmp_path: Path) -> None:
    with loaded(model, tmp_path, **{WHEN: "crash"}) as (load, session):
        load.until((session / "scheduler_steps.csv").exists)
        load.rest(2.0)
    wait_until_complete(session)
    assert taken_of(session) == []
    assert log_of(session)["taken"] == []


class Following:
    """A collector's follower of a recorded session, in this process, and its snapshots."""

    def __init__(
        self, story: Recording, session: Path, limit: str = "5,0s", last: float = 600
    ) -> None:
        most, between = limit.split(",")
        self.session = session
        self.story = story
        self.follower = begun(session)
        self.rotation = Rotation(self.follower, ALL)
        self.snapshots = Snapshots(
            self.follower, self.rotation, Limit(int(most), float(between[:-1])), last
        )

    def at(self, share: float) -> int:
        """The moment at which so much of the recording is over."""
        begin, end = self.story.begin_ns, self.story.end_ns
        return begin + int(share * (end - begin))

    def advance(self, share: float) -> int:
        advance(self.follower, time := self.at(share))
        return time

    def fire(self, share: float, reason: str = "because") -> None:
        now = self.advance(share)
        self.snapshots.fire([reason], self.follower.seconds(now))

    def turn(self, share: float) -> None:
        """Go on until nothing is on its way any more."""
        give_up = time.monotonic() + PATIENCE_SEC
        now = self.at(share)
        while self.snapshots.is_busy:
            assert time.monotonic() < give_up
            self.rotation.turn(now)
            self.snapshots.turn(now)
            time.sleep(0.005)


@contextmanager
def following(recording: Recording, **options: Any) -> Iterator[Following]:  # noqa: F811
    with copied(recording) as session:
        yield Following(recording, session, **options)


def test_the_limits(recording: Recording) -> None:  # noqa: F811
    with following(recording, limit="2,1s") as it:
        shares = [0.1, 0.11, 0.5, 0.51, 0.9]
        length = (recording.end_ns - recording.begin_ns) / 1e9
        assert 0.05 * length < 1 < 0.39 * length
        # Somebody's own wish takes nobody's place.
        it.advance(0.05)
        it.snapshots.ask()
        it.turn(0.05)
        for share in shares:
            it.fire(share, f"at {share}")
            it.turn(share)
        log = it.follower.snapshots
        assert [each.reason for each in log.taken] == ["SIGUSR2", "at 0.1", "at 0.5"]
        assert (log.left_out, log.failed) == (3, 0)
        # It is granted when the limit is reached, too.
        it.snapshots.ask()
        it.turn(0.9)
        assert [each.reason for each in log.taken][3:] == ["SIGUSR2"]
        # What was taken is known to the next collector.
        it.follower.write(ended=False)
        again = Following(recording, it.session, limit="2,1s")
        assert again.follower.snapshots == log
        again.fire(0.95)
        assert again.follower.snapshots.left_out == 4
        end(again.follower)
        assert log_of(it.session)["left_out"] == 4
        assert len(taken_of(it.session)) == 4


def test_one_at_a_time(recording: Recording) -> None:  # noqa: F811
    with following(recording) as it:
        it.fire(0.3, "first")
        it.fire(0.4, "second")
        it.snapshots.ask()
        it.snapshots.ask()
        it.turn(0.4)
        log = it.follower.snapshots
        assert [each.reason for each in log.taken] == ["first", "SIGUSR2"]
        assert log.left_out == 1
        end(it.follower)


def test_nothing_is_there_to_be_taken(recording: Recording) -> None:  # noqa: F811
    with following(recording) as it:
        it.snapshots.ask()
        it.turn(0.0)
        log = it.follower.snapshots
        assert (log.failed, log.problem) == (1, "nothing has been recorded yet")
        it.snapshots.ask()
        it.turn(0.0)
        it.fire(0.5)
        it.turn(0.5)
        # Nothing new since: what is closed already is taken.
        it.snapshots.ask()
        it.turn(0.5)
        assert (log.failed, len(log.taken)) == (2, 2)
        one, other = taken_of(it.session)
        assert whole(one) == whole(other)
        end(it.follower)


def test_what_it_covers(recording: Recording) -> None:  # noqa: F811
    """As much before its end as was asked for, in whole segments; older ones stay until then."""
    with following(recording, last=0.3 * (recording.end_ns - recording.begin_ns) / 1e9) as it:
        for share in (0.2, 0.4, 0.6, 0.7):
            it.rotation.cut(it.advance(share))
            assert it.follower.segments.finish()
        it.fire(0.8)
        it.rotation._keep = Keep(1, None)
        it.rotation.remove_old()
        it.turn(0.8)
        (path,) = taken_of(it.session)
        assert sorted(each.name for each in (path / "segments").iterdir()) == [
            "0003",
            "0004",
            "0005",
        ]
        it.rotation.remove_old()
        assert [each.number for each in it.follower.segments.closed] == [5]
        before = whole(path)
        shutil.rmtree(it.session / "segments" / "0005")
        assert whole(path) == before
        assert metadata_of(path)["window"]["removed_segments"] == 2


def test_it_says_what_one_by_hand_says(recording: Recording) -> None:  # noqa: F811
    """One that is taken in the same moment."""
    last = 0.1
    with following(recording, last=last) as it:
        for share in (0.3, 0.5):
            it.rotation.cut(it.advance(share))
            assert it.follower.segments.finish()
        it.fire(0.7)
        it.turn(0.7)
        it.follower.write(ended=False)
        (path,) = taken_of(it.session)
        other = it.session.with_name("by hand")
        with pytest.MonkeyPatch.context() as patch:
            # Its collector is at work.
            patch.setattr("analysis.tables.completing.complete", lambda _: ("running", "it runs"))
            take(it.session, datetime.now(timezone.utc), last_sec=last, target=other)
        assert whole(path) == whole(other)
        unlike = differences(said(path), said(other))
        of_a_snapshot = (".session.", ".cost.table_bytes")
        assert [each for each in unlike if not each.startswith(of_a_snapshot)] == []
        mine, its = metadata_of(path), metadata_of(other)
        for each in (mine, its):
            del each["snapshot"]["taken_at"], each["snapshot"]["reason"]
        # The table that is written anew each time is none of those that the collector counts.
        its["cost"]["table_bytes"] -= (other / "cuda_graph_usage.csv").stat().st_size
        assert mine == its
        end(it.follower)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, on which nothing can be linked."""
    with mounted(tmp_path / "disk", "2m") as disk:
        yield disk


@contextmanager
def full(disk: Path) -> Iterator[None]:
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    yield
    filler.unlink()


@pytest.mark.parametrize("while_it", ["closes", "copies"])
def test_a_full_disk(
    recording: Recording,  # noqa: F811
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    while_it: str,
) -> None:
    """There is no snapshot, which is counted, and the session goes on."""
    monkeypatch.setattr(rotation, "RETRY_SEC", 0.0)
    monkeypatch.setattr(snapshot.os, "link", refused)
    with copied(recording) as original:
        session = Path(shutil.copytree(original, small_disk / original.name))
        it = Following(recording, session)
        it.fire(0.5, "first")
        if while_it == "copies":
            it.snapshots.turn(it.at(0.5))
            assert it.follower.segments.finish()
        with full(small_disk):
            it.turn(0.5)
        log = it.follower.snapshots
        assert (log.failed, log.left_out, log.taken) == (1, 0, [])
        problem = "it cannot be written: No space left on device"
        assert log.problem == problem or while_it == "closes"
        assert "No space left on device" in str(log.problem)
        assert "no snapshot: " in capfd.readouterr().err
        assert taken_of(session) == []
        assert halves_of(session) == []
        it.rotation.turn(it.at(0.5))
        assert it.follower.segments.finish() or it.follower.segments.closed
        it.fire(0.7, "second")
        it.turn(0.7)
        assert [each.reason for each in log.taken] == ["second"]
        end(it.follower)
        assert whole(session) == recording.tables
        assert metadata_of(session)["complete"]
        assert log_of(session)["failed"] == 1
        (path,) = taken_of(session)
        for table, data in whole(path).items():
            assert recording.tables[table].startswith(data)


def refused(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "not here")


def test_a_journal_that_cannot_be_cut(
    recording: Recording,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "CUT_SEC", 0.05)
    monkeypatch.setattr(Follower, "can_be_saved", False)
    with following(recording) as it:
        it.fire(0.5)
        it.turn(0.5)
        log = it.follower.snapshots
        assert log.failed == 1
        assert "the journals cannot be read" in str(log.problem)
        assert not it.rotation.is_held
        end(it.follower)


def test_a_session_that_was_renamed(recording: Recording) -> None:  # noqa: F811
    with following(recording) as it:
        it.fire(0.5)
        it.session.rename(it.session.with_name("other"))
        it.turn(0.5)
        assert "was renamed" in str(it.follower.snapshots.problem)
        assert [path.name for path in it.session.parent.iterdir()] == ["other"]


def test_a_collector_that_is_killed_while_it_links(model: Path, tmp_path: Path) -> None:
    """There is no half snapshot. The next collector clears what is left, and takes another."""

    def run(say: Say) -> None:
        def hang(*_: object) -> None:
            say("links")
            threading.Event().wait()

        snapshot.copy = hang  # type: ignore[assignment]
        snapshot.os.link = refused  # type: ignore[attr-defined]
        say("starts")
        collect([str(session)])

    with hooks_only(tmp_path):
        launched: list[Path] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "start", launched.append)
            load = Load(model)
            session = load.until(lambda: next(iter(tmp_path.glob("session_*")), None))
            child = Child(run)
            assert child.next() == "starts"
            load.until((session / "scheduler_steps.csv").exists)
            os.kill(child.pid, signal.SIGUSR2)
            assert child.next() == "links"
            assert [NAME.match(name[1:]) is not None for name in halves_of(session)] == [True]
            child.kill()
            child.end()
            assert taken_of(session) == []
            assert len(halves_of(session)) == 1

            def follow(say: Say) -> None:
                say("starts")
                collect([str(session)])

            following = Child(follow)
            assert following.next() == "starts"
            load.until(lambda: halves_of(session) == [])
            os.kill(following.pid, signal.SIGUSR2)
            load.until(lambda: taken_of(session))
    assert following.end() == 0
    wait_until_complete(session)
    (path,) = taken_of(session)
    assert log_of(session)["taken"][0]["name"] == path.name
    assert Tables(session).metadata["complete"]
    check_it_is_a_session(path, session, log_of(session)["taken"][0])
