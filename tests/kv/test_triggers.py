# SPDX-License-Identifier: Apache-2.0
"""What fires by the totals, second by second, is what the tables say of that time."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilemate.collector import triggers
from profilemate.collector.follower import Follower
from profilemate.collector.triggers import SECOND_NS, Triggers
from profilemate.format import processes
from profilemate.format.when import Condition, read_when
from tests.collector.journals import EngineJournal
from tests.kv.recording import Clock, Row, Tables, found, hooks_only, make_tables, only_session
from tests.kv.workload import Add, Driver, Operation, Reset, Setting, Steps, Wait, scheduler_for
from tests.support.oracle import Oracle

SETTING = Setting(blocks=24, max_num_seqs=5, max_num_batched_tokens=128)
LEAST_TOKENS = 100


@dataclass(frozen=True)
class Recording:
    """A session of ``seconds``, and its tables."""

    session: Path
    tables: Tables
    seconds: int


def eventful() -> list[Operation]:
    """Stretches of load and of idleness, with preemptions, resets and long queues."""
    chance = random.Random(11)
    operations: list[Operation] = []
    for stretch in range(12):
        for _ in range(chance.randrange(4, 14)):
            output = chance.choice([4, 40, 90])
            operations += [
                Add(chance.randrange(3), chance.randrange(100), 1 + chance.randrange(60), output),
                Steps(1 + chance.randrange(3)),
                Wait(chance.choice([1, 30, 250])),
            ]
        for _ in range(chance.randrange(20)):
            operations += [Steps(chance.randrange(1, 12)), Wait(chance.choice([1, 40, 600]))]
        # It is refused: requests hold blocks.
        operations += [Add(0, 40, 9, 40), Steps(2), Reset()]
        if stretch % 3 == 2:
            operations += [Steps(900), Reset(), Wait(700), Reset(), Wait(2_500)]
    return operations


class Punctual(Driver):
    """Lets no request arrive shortly before a whole second: a step later, the journal tells of it,
    or as much later as one that schedules nothing is told."""

    def do(self, operation: Operation) -> None:
        if isinstance(operation, Add) and self.clock.now % SECOND_NS > 0.6 * SECOND_NS:
            self.clock.tick((SECOND_NS - self.clock.now % SECOND_NS) // 1_000)
        super().do(operation)


@pytest.fixture(scope="module")
def recording(model: Path, hooks_on: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("recording")
    clock = Clock()
    begin = clock.now
    name = found(folder, clock)
    with (
        Oracle().watching() as oracle,
        hooks_only(folder, clock, name=name, thread=False),
    ):
        Punctual(scheduler_for(model, SETTING), oracle, clock, SETTING).run(eventful())
    session = only_session(folder)
    tables = make_tables(session, folder / "tables")
    assert tables.metadata["complete"]
    assert sum(row["preempted_reqs"] for row in tables.rows("scheduler_steps.csv")) > 20
    return Recording(session, tables, (clock.now - begin) // SECOND_NS)


def fired(recording: Recording, when: str, since: int = 1) -> list[tuple[int, str]]:
    """At which seconds what fires, as a collector sees it that began at the second ``since``."""
    with tempfile.TemporaryDirectory() as scratch:
        session = Path(shutil.copytree(recording.session, Path(scratch, "session")))
        follower = Follower(session, session)
        follower.discover()
        while follower.read():
            pass
        watched = Triggers(read_when(when))
        found = []
        for second in range(1, recording.seconds + 1):
            time = follower.founding.origin_ns + second * SECOND_NS
            follower.apply(time)
            fires = second >= since
            found += [(second, text) for text in watched.read(follower, time, fires=fires)]
        follower.close()
    return found


def counted(recording: Recording, when: str, since: int = 1) -> list[tuple[int, str]]:
    """The same, counted from the whole tables. The first reading is at second 1."""
    (condition,) = read_when(when)
    of = _COUNTS[condition.measure]
    found, was_met = [], False
    for second in range(1, recording.seconds + 1):
        begin = second - condition.seconds
        text = of(recording.tables, condition, begin, second) if begin >= 1 else None
        if text is not None and second >= since and not was_met:
            found.append((second, f"{condition.text}: {text} on engine 0"))
        was_met = text is not None and second >= since
    return found


@cache
def rows_of(tables: Tables, table: str) -> list[Row]:
    return tables.rows(table)


@cache
def requests_of(tables: Tables) -> list[Row]:
    return list(tables.requests().values())


def limit_of(condition: Condition, unit: int) -> Fraction:
    return Fraction(condition.limit, unit)


def micro(seconds: float) -> int:
    return round(seconds * 1e6)


def within(rows: list[Row], begin: int, end: int) -> list[Row]:
    """Those after the one second, up to and with the other one."""
    return [row for row in rows if begin * 10**6 < micro(row["timestamp_sec"]) <= end * 10**6]


def preemptions(tables: Tables, condition: Condition, begin: int, end: int) -> str | None:
    steps = within(rows_of(tables, "scheduler_steps.csv"), begin, end)
    count = sum(row["preempted_reqs"] for row in steps)
    is_met = count > condition.limit if condition.above else count < condition.limit
    return f"{count:,}" if is_met else None


def usage(tables: Tables, condition: Condition, begin: int, end: int) -> str | None:
    rows = rows_of(tables, "kv_cache_usage.csv")
    before = [row for row in rows if micro(row["timestamp_sec"]) <= begin * 10**6][-1:]
    shares = [
        Fraction(100 * row["num_blocks"], row["total_blocks"])
        for row in [*before, *within(rows, begin, end)]
    ] or [Fraction(0)]
    limit = limit_of(condition, 10**6)
    if condition.above:
        return f"at least {float(min(shares)):.2f} %" if min(shares) >= limit else None
    return f"at most {float(max(shares)):.2f} %" if max(shares) <= limit else None


def hit_rate(tables: Tables, condition: Condition, begin: int, end: int) -> str | None:
    lookups = [
        row
        for row in within(rows_of(tables, "prefix_cache_lookups.csv"), begin, end)
        if row["admitted"] and row["kind"] in ("first", "retry")
    ]
    asked, hit = (sum(row[name] for row in lookups) for name in ("query_tokens", "hit_tokens"))
    if asked < LEAST_TOKENS:
        return None
    share, limit = Fraction(100 * hit, asked), limit_of(condition, 10**6)
    is_met = share > limit if condition.above else share < limit
    return f"{float(share):.2f} % of {asked:,} tokens" if is_met else None


def queue(tables: Tables, condition: Condition, begin: int, end: int) -> str | None:
    waits = []
    for row in requests_of(tables):
        arrived = round(row["timestamp"] * 1e3)
        admitted = None if row["queue_sec"] is None else arrived + micro(row["queue_sec"])
        if admitted is not None and begin * 10**6 < admitted <= end * 10**6:
            waits.append(admitted - arrived)
        left = micro(row["finish_sec"]) if admitted is None else admitted
        if arrived <= end * 10**6 < left:
            waits.append(end * 10**6 - arrived)
    if not waits:
        return None
    waits.sort()
    # The smallest of them that at least 95 in 100 do not exceed.
    percentile = waits[-(-95 * len(waits) // 100) - 1]
    limit = limit_of(condition, 1_000)
    if not (percentile > limit if condition.above else percentile < limit):
        return None
    longer = sum(wait > limit if condition.above else wait >= limit for wait in waits)
    return (
        f"{longer} of {len(waits)} requests waited {'longer' if condition.above else 'that long'}"
    )


_COUNTS: dict[str, Callable[[Tables, Condition, int, int], str | None]] = {
    "preemptions": preemptions,
    "usage": usage,
    "hit_rate": hit_rate,
    "queue_p95": queue,
}

seconds = st.integers(1, 12)
signs = st.sampled_from("><")
percents = st.one_of(st.integers(0, 100), st.sampled_from(["69.565217", "78.26087", "99.9"]))
conditions = st.one_of(
    st.builds("preemptions{}{}/{}s".format, signs, st.integers(0, 40), seconds),
    st.builds("usage{}{}%/{}s".format, signs, percents, seconds),
    st.builds("hit_rate{}{}%/{}s".format, signs, percents, seconds),
    st.builds("queue_p95{}{}ms/{}s".format, signs, st.integers(0, 4_000), seconds),
)


@settings(max_examples=120, deadline=None)
@given(when=conditions, since=st.one_of(st.just(1), st.integers(2, 40)))
def test_what_fires_is_what_the_tables_say(recording: Recording, when: str, since: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triggers, "LEAST_TOKENS", LEAST_TOKENS)
        assert fired(recording, when, since) == counted(recording, when, since)


@pytest.mark.parametrize(
    "when",
    ["preemptions>5/3s", "usage>70%/2s", "usage<10%/2s", "hit_rate<30%/4s", "queue_p95>300ms/3s"],
)
def test_the_recording_has_all_of_it(recording: Recording, when: str) -> None:
    """So that the comparison above compares something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triggers, "LEAST_TOKENS", LEAST_TOKENS)
        assert len(counted(recording, when)) > 1


def test_a_reset_fires_at_the_next_second(recording: Recording) -> None:
    resets = {
        -(-micro(row["timestamp_sec"]) // 10**6)
        for row in recording.tables.rows("kv_cache_allocations.csv")
        if row["event"] == "reset"
    }
    events = [row["event"] for row in recording.tables.rows("kv_cache_allocations.csv")]
    assert events.count("reset_refused") > 2
    first = {second for second in resets if second - 1 not in resets}
    found = fired(recording, "reset")
    assert {second for second, _ in found} == first
    assert len(first) > 2
    assert {text for _, text in found} == {"reset: its prefix cache was dropped on engine 0"}


def test_several_fire_together(recording: Recording) -> None:
    together = fired(recording, "preemptions>5/3s or usage>90%/2s or reset")
    alone = [
        each
        for when in ("preemptions>5/3s", "usage>90%/2s", "reset")
        for each in fired(recording, when)
    ]
    assert together == sorted(alone, key=lambda each: each[0])


def test_an_idle_engine_has_no_hit_rate(recording: Recording) -> None:
    assert triggers.LEAST_TOKENS == 10_000
    assert fired(recording, "hit_rate<100%/1s") == []


@pytest.mark.parametrize(
    ("when", "part"),
    [
        *[("preemptions<9999/2s", "frees"), ("usage<100%/2s", "blocks")],
        *[("hit_rate<100%/2s", "lookups"), ("queue_p95<1m/2s", "requests")],
    ],
)
def test_what_is_not_recorded_any_more_meets_nothing(when: str, part: str) -> None:
    (condition,) = read_when(when)
    measure = triggers._MEASURES[condition.measure](condition)

    def reading(second: int, *lost: str) -> Any:
        return triggers.Reading(
            preemptions=second,
            held=((1, 1, 10),),
            asked_tokens=second * 20_000,
            hit_tokens=0,
            admitted_ns=[1],
            waiting_ns=[],
            resets=0,
            lost=frozenset(lost),
        )

    met = [measure.met(reading(second, *([part] if second == 5 else []))) for second in range(9)]
    assert [text is not None for text in met] == [False] * 2 + [True] * 3 + [False] * 3 + [True]


@pytest.mark.parametrize("part", [None, "frees"])
def test_a_part_that_ends_early(tmp_path: Path, part: str | None) -> None:
    engine = EngineJournal(tmp_path)
    for second in range(1, 7):
        engine.allocated(10**6 * second - 1, second)
        engine.flush()
        if second == 2 and part is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "monotonic_ns", lambda: engine.at(2 * 10**6))
                engine.recorder.lose([part], "a hook", RuntimeError())
    engine.killed()
    follower = Follower(engine.folder, engine.folder)
    follower.discover()
    while follower.read():
        pass
    watched = Triggers(read_when("preemptions<1/3s"))
    found = []
    for second in range(1, 7):
        now = engine.at(10**6 * second)
        follower.apply(now)
        found += [(second, text) for text in watched.read(follower, now)]
    follower.close()
    assert found == ([] if part else [(4, "preemptions<1/3s: 0 on engine 0")])


def test_before_the_first_step_no_pool_is_empty(tmp_path: Path) -> None:
    """A server that waits for its first request."""
    engine = EngineJournal(tmp_path)
    engine.flush()
    follower = Follower(engine.folder, engine.folder)
    watched = Triggers(read_when("usage<15%/3s"))
    found = []
    for second in range(1, 20):
        if second == 9:
            engine.allocated(10**6 * second - 1, 1)
            engine.flush()
        follower.discover()
        while follower.read():
            pass
        now = engine.at(10**6 * second)
        follower.apply(now)
        found += [(second, text) for text in watched.read(follower, now)]
    engine.killed()
    follower.close()
    assert found == [(12, "usage<15%/3s: at most 10.00 % on engine 0")]


def test_an_engine_that_is_gone_without_its_end(tmp_path: Path) -> None:
    """It is named once, and neither one that ended nor one that was gone before."""
    process = subprocess.Popen(["sleep", "600"])
    of = {"pid": process.pid, "start": processes.start_of(process.pid)}
    me = {"pid": os.getpid(), "start": processes.start_of(os.getpid())}
    engines = [EngineJournal(tmp_path, rank, **each) for rank, each in enumerate((me, of, me, {}))]
    ended, killed, *others = engines
    for number, engine in enumerate(engines):
        engine.allocated(10**5 + number, 1)
        engine.flush()
    follower = Follower(ended.folder, ended.folder)
    watched = Triggers(read_when("crash"))

    def look(second: int) -> list[str]:
        follower.discover()
        while follower.read():
            pass
        now = ended.at(10**6 * second)
        follower.apply(now)
        return watched.read(follower, now)

    assert look(1) == []
    ended.recorder.close()
    killed.allocated(3 * 10**6 - 1, 2)
    killed.killed()
    assert look(2) == []
    process.kill()
    process.wait()
    # Not all that it wrote is applied.
    assert look(2) == []
    assert watched.waits_for(follower)
    assert look(3) == ["crash: engine 1 is gone"]
    assert not watched.waits_for(follower)
    assert look(4) == []
    follower.close()
    for engine in others:
        engine.killed()
