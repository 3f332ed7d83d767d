# SPDX-License-Identifier: Apache-2.0
"""What is recorded after a pause is what a recording without one says of the same time.

Each workload runs twice, from the same origin and with the same key: once recorded as a whole, once
with pauses. What the second cannot know, it says so: no figure of it is another one.
"""

from __future__ import annotations

import os
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilemate.format import control
from profilemate.format.folder import Folder
from profilemate.hooks.instances import is_hook
from profilemate.record import recorder
from tests.kv import totals, workload
from tests.kv.children import said
from tests.kv.recording import (
    PATIENCE_SEC,
    Clock,
    Row,
    Tables,
    found,
    hooks_only,
    make_tables,
    only_session,
    wait_until_written,
)
from tests.kv.test_lost_parts import remove
from tests.kv.test_writer import wait_for
from tests.kv.workload import Driver, Operation, Setting, Steps, busy, scheduler_for
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("hooks_on")

SETTING = Setting(blocks=24, max_num_seqs=5, max_num_batched_tokens=128, policy="priority")


@dataclass(frozen=True)
class Pair:
    """One workload, recorded as a whole and with pauses, and their times in microseconds."""

    whole: Tables
    paused: Tables
    pauses: list[tuple[int, int]]
    setting: Setting

    def recorded(self, table: str, *, after_last: bool = False) -> list[Row]:
        """The rows of the whole recording at times that the other one recorded, too."""
        return [
            row
            for row in self.whole.rows(table)
            if self._is_recorded(_micros(row["timestamp_sec"]), after_last=after_last)
        ]

    def _is_recorded(self, time: int, *, after_last: bool) -> bool:
        if after_last:
            return not self.pauses or time > self.pauses[-1][1]
        return not any(begin < time <= end for begin, end in self.pauses)

    def known_since(self, time: int) -> int:
        """From when on all is known that leads to this time."""
        ends = [end for _, end in self.pauses if end < time]
        return max(ends, default=-1)


def record(
    model: Path,
    setting: Setting,
    operations: Sequence[Operation],
    folder: Path,
    switches: Sequence[int] = (),
) -> Tables:
    """Run the operations. Before each of the ``switches`` the recording is to pause, or go on."""
    clock = Clock()
    name = found(folder, clock)
    with (
        Oracle().watching() as oracle,
        hooks_only(folder, clock, name=name, thread=False),
    ):
        driver = Driver(scheduler_for(model, setting), oracle, clock, setting)
        (recording,) = recorder._living()
        for number, operation in enumerate(operations):
            if switches.count(number) % 2:
                recording.wants_pause = not recording.wants_pause
            driver.do(operation)
        recording.wants_pause = False
        driver.drain()
    return make_tables(only_session(folder), folder / "tables")


def pair(
    model: Path,
    setting: Setting,
    operations: Sequence[Operation],
    switches: Sequence[int],
    folder: Path,
) -> Pair:
    """Record the operations twice."""
    for name in ("whole", "paused"):
        (folder / name).mkdir()
    whole = record(model, setting, operations, folder / "whole")
    paused = record(model, setting, operations, folder / "paused", switches)
    (process,) = paused.metadata["processes"]
    assert process["problem"] is None
    assert process["mismatches"] == 0
    assert process["lost"] == {}
    times = [
        (_micros(begin), _NEVER if until is None else _micros(until))
        for begin, until in process["pauses"]
    ]
    return Pair(whole, paused, times, setting)


def check(both: Pair) -> None:
    """Every table of the recording with pauses."""
    check_usage(both)
    check_moves(both)
    check_evictions(both)
    check_lookups(both)
    check_requests(both)
    check_steps(both)
    check_totals(both)


def check_usage(both: Pair) -> None:
    """At every row the pool stands as it does in the whole recording at that moment, and no other
    change was recorded there."""
    states: dict[tuple[int, int], list[tuple[int, Row]]] = {}
    for row in both.whole.rows("kv_cache_usage.csv"):
        states.setdefault((row["engine"], row["pool"]), []).append(
            (_micros(row["timestamp_sec"]), row)
        )
    written = both.paused.rows("kv_cache_usage.csv")
    for row in written:
        known = states[row["engine"], row["pool"]]
        at = bisect_right(known, _micros(row["timestamp_sec"]), key=lambda pair: pair[0])
        assert at, row
        assert _without(row, "timestamp_sec") == _without(known[at - 1][1], "timestamp_sec")
    begins = {end for _, end in both.pauses}
    changes = [row for row in written if _micros(row["timestamp_sec"]) not in begins]
    after = {_key(row) for row in both.recorded("kv_cache_usage.csv")}
    assert after <= {_key(row) for row in written}
    # Where a pause ended, the state may be an old one.
    assert {_key(row) for row in changes} <= {_key(row) for row in both.whole.rows(_USAGE)}


_USAGE = "kv_cache_usage.csv"
_NEVER = 1 << 60


def check_moves(both: Pair) -> None:
    """The same calls, and at the end of each pause what the requests hold."""
    moves = both.paused.rows("kv_cache_allocations.csv")
    held = [row for row in moves if row["event"] == "held"]
    ends = {end for _, end in both.pauses}
    assert {_micros(row["timestamp_sec"]) for row in held} <= ends
    assert all(row["num_blocks"] for row in held)
    before = both.recorded("kv_cache_allocations.csv")
    # Of blocks that were parked nothing says whose they are; steps are counted as recorded.
    less = ("step", "request_id", "group")
    assert [_without(row, *less) for row in moves if row["event"] != "held"] == [
        _without(row, *less) for row in before
    ]
    for row, as_whole in zip((r for r in moves if r["event"] != "held"), before, strict=True):
        assert row["request_id"] in ("", as_whole["request_id"])
        if row["request_id"] or both.setting.groups == "full":
            assert row["group"] == as_whole["group"]
        if row["event"] in ("allocate", "reuse"):
            assert row["request_id"] == as_whole["request_id"]


def check_evictions(both: Pair) -> None:
    """The same contents were lost; their times are the same, or not known."""
    rows, as_whole = both.paused.rows(_EVICTIONS), both.recorded(_EVICTIONS)
    known = ("timestamp_sec", "block_id", "reason", "content_id", "copies_left", "engine", "pool")
    assert [[row[name] for name in known] for row in rows] == [
        [row[name] for name in known] for row in as_whole
    ]
    for row, other in zip(rows, as_whole, strict=True):
        time = _micros(row["timestamp_sec"])
        since = both.known_since(time)
        _check_known(row, other, "lifetime_sec", time, since)
        _check_known(row, other, "idle_sec", time, since)
        if other["evictable_sec"] is None:
            assert row["evictable_sec"] is None
        else:
            _check_known(row, other, "evictable_sec", time, since)
        is_whole = time - _micros(other["lifetime_sec"]) > since
        assert row["reuse_count"] == (other["reuse_count"] if is_whole else None)
        # A block may have got its content after the pause.
        assert row["origin"] in ({other["origin"]} if is_whole else {"", other["origin"]})
        assert row["evicting_request"] == other["evicting_request"]
        assert row["group"] == other["group"]
        assert row["owner_request"] in ("", other["owner_request"])
        if is_whole:
            assert row["owner_request"] == other["owner_request"]


_EVICTIONS = "kv_cache_evictions.csv"


def _check_known(row: Row, other: Row, name: str, time: int, since: int) -> None:
    """It is what the whole recording says if it began after the pause, and is empty if not."""
    began = time - _micros(other[name])
    assert row[name] == (other[name] if began > since else None), (name, row, other)


def check_lookups(both: Pair) -> None:
    """Every lookup that led to an admission; those that did not are put together by the second."""
    names = ("timestamp_sec", "request_id", "query_tokens", "hit_tokens", "engine")
    rows, as_whole = (
        [row for row in found if row["admitted"] == 1]
        for found in (both.paused.rows(_LOOKUPS), both.recorded(_LOOKUPS))
    )
    assert [[row[name] for name in names] for row in rows] == [
        [row[name] for name in names] for row in as_whole
    ]
    for row, other in zip(rows, as_whole, strict=True):
        # One that waits when the recording goes on may have been looked up before.
        assert row["kind"] == other["kind"] or (row["kind"], other["kind"]) == ("retry", "first")


_LOOKUPS = "prefix_cache_lookups.csv"


def check_requests(both: Pair) -> None:
    """The rows of all requests that came and went while it was recorded, and of no other."""
    rows, as_whole = both.paused.requests(), both.whole.requests()
    wanted = {
        name
        for name, row in as_whole.items()
        if both.known_since(_micros(row["finish_sec"])) < round(row["timestamp"] * 1e3)
        and both._is_recorded(_micros(row["finish_sec"]), after_last=False)
        and both._is_recorded(round(row["timestamp"] * 1e3), after_last=False)
    }
    assert set(rows) == wanted
    for name, row in rows.items():
        other = as_whole[name]
        ids = ("hash_ids", "output_hash_ids", "prefix_ids")
        assert _without(row, *ids) == _without(other, *ids)
        # Contents that occur once are numbered.
        full = row["input_length"] // row["block_size"]
        assert len(row["hash_ids"]) == len(other["hash_ids"])
        assert row["output_hash_ids"] == other["output_hash_ids"]
        for mine, theirs in zip(row["hash_ids"][:full], other["hash_ids"][:full], strict=True):
            assert mine == theirs or max(mine, theirs) < _FIRST_CONTENT


_FIRST_CONTENT = 1 << 40
"""Ids of contents that occur once are far below."""


def check_steps(both: Pair) -> None:
    """Every step that was recorded, but for the numbers, which count those that were recorded."""
    rows = both.paused.rows("scheduler_steps.csv")
    busy_rows = [_without(row, "step", "repeats") for row in rows if row["scheduled_tokens"]]
    assert busy_rows == [
        _without(row, "step", "repeats")
        for row in both.recorded("scheduler_steps.csv")
        if row["scheduled_tokens"]
    ]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})


def check_totals(both: Pair) -> None:
    """The totals are those of the rows, and of the time in which it was recorded."""
    tables = both.paused
    (engine,) = totals.totals(tables.folder)["engines"]
    moves, evictions = tables.rows("kv_cache_allocations.csv"), tables.rows(_EVICTIONS)
    for pool in engine["pools"]:
        for event, key in (("allocate", "allocated"), ("reuse", "reused"), ("cache", "cached")):
            assert sum(group[f"{key}_blocks"] for group in pool["groups"]) == sum(
                row["num_blocks"]
                for row in moves
                if (row["event"], row["pool"]) == (event, pool["pool"])
            )
        mine = [row for row in evictions if row["pool"] == pool["pool"]]
        counted = Counter((row["group"], row["reason"], row["origin"] or "unknown") for row in mine)
        assert counted == {
            (each["group"], each["reason"], each["origin"]): each["blocks"]
            for each in pool["evictions"]
        }
        assert sum(each["never_reused"] for each in pool["evictions"]) == sum(
            row["reuse_count"] == 0 for row in mine
        )
        states = [
            _micros(row["timestamp_sec"])
            for row in tables.rows(_USAGE)
            if row["pool"] == pool["pool"]
        ]
        end = _micros(tables.metadata["duration_sec"])
        stood_still = sum(
            min(until, end) - begin for begin, until in both.pauses if states and begin >= states[0]
        )
        lasted = end - states[0] - stood_still if states else 0
        assert sum(pool["band_ns"].values()) == 1_000 * lasted
    known = {"lifetime": "lifetime_sec", "idle": "idle_sec", "evictable": "evictable_sec"}
    for name, column in {**known, "reuses": "reuse_count"}.items():
        values = [row[column] for row in evictions if row[column] is not None]
        total = sum(values) if name == "reuses" else 1_000 * sum(map(_micros, values))
        assert (engine["blocks"][name]["count"], engine["blocks"][name]["sum"]) == (
            len(values),
            total,
        )
    arrived = {
        round(row["timestamp"] * 1e3)
        for row in both.whole.requests().values()
        if both._is_recorded(round(row["timestamp"] * 1e3), after_last=False)
    }
    assert engine["requests"]["arrived"] == len(arrived)
    assert sum(engine["requests"]["finished"].values()) == len(tables.requests())


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.values())


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def test_a_busy_engine(model: Path, tmp_path: Path) -> None:
    operations = busy()
    both = pair(model, SETTING, operations, [20, 40, 70, 90], tmp_path)
    check(both)
    assert len(both.pauses) == 2
    evictions = both.paused.rows(_EVICTIONS)
    ages = Counter(row["lifetime_sec"] is None for row in evictions)
    assert ages[True] > 5
    assert ages[False] > 50
    assert any(row["event"] == "held" for row in both.paused.rows("kv_cache_allocations.csv"))


switches = st.lists(st.integers(0, 60), min_size=2, max_size=6).map(sorted)
examples = given(setting=workload.settings, operations=workload.operations, switches=switches)


@settings(max_examples=150)
@examples
def test_full_attention(
    model: Path, setting: Setting, operations: list[Operation], switches: list[int]
) -> None:
    run(model, setting, operations, switches)


@settings(max_examples=60)
@examples
def test_beside_sliding_windows(
    model: Path, setting: Setting, operations: list[Operation], switches: list[int]
) -> None:
    run(model, replace(setting, groups="window", blocks=3 * setting.blocks), operations, switches)


@settings(max_examples=60)
@examples
def test_beside_mamba_states(
    model: Path, setting: Setting, operations: list[Operation], switches: list[int]
) -> None:
    run(model, replace(setting, groups="mamba"), operations, switches)


def run(model: Path, setting: Setting, operations: list[Operation], switches: list[int]) -> None:
    """Record the operations twice, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        check(pair(model, setting, operations, switches, Path(folder)))


def ask(session: Path, *, paused: bool) -> None:
    with Folder.own(session / "journal") as journals:
        control.ask(journals, paused=paused)


def step_until(scheduler: Any, is_done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_SEC
    while not is_done():
        assert time.monotonic() < give_up
        scheduler.schedule()
        time.sleep(0.005)


def test_the_thread_sees_what_the_user_asks_for(model: Path, tmp_path: Path) -> None:
    """While the engine has steps, and while it has none."""
    with hooks_only(tmp_path):
        scheduler = scheduler_for(model, SETTING)
        session = only_session(tmp_path)
        recording = recorder._living()[-1]
        pool = scheduler.kv_cache_manager.block_pool
        hooks = {name for name, value in vars(pool).items() if is_hook(value)}
        assert len(hooks) > 3
        step_until(scheduler, lambda: recording.waiting == 0)
        ask(session, paused=True)
        step_until(scheduler, lambda: recording.is_paused)
        hooked = [name for name in dir(scheduler) if is_hook(getattr(scheduler, name, None))]
        assert hooked == ["schedule"]
        assert not hooks & set(vars(pool))
        # Nothing is written meanwhile, so that nothing wakes the thread.
        wait_until_written()
        ask(session, paused=False)
        wait_for(lambda: not recording.wants_pause)
        assert recording.is_paused
        scheduler.schedule()
        assert not recording.is_paused
        assert {name for name, value in vars(pool).items() if is_hook(value)} == hooks
        # Asked for and taken back before there was a step: there is no pause.
        ask(session, paused=True)
        step_until(scheduler, lambda: recording.wants_pause or recording.is_paused)
        del scheduler, pool
    tables = make_tables(session, tmp_path / "tables")
    assert len(tables.metadata["processes"][0]["pauses"]) in (1, 2)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"paused": 1}', b'{"paused": "yes"}', b"x" * 10_000, b"[" * 9_000],
)
def test_odd_requests_change_nothing(tmp_path: Path, content: bytes) -> None:
    asked = control.Asked(tmp_path)
    path = tmp_path / control.CONTROL_FILE
    assert not asked.is_paused()
    path.write_bytes(content)
    assert not asked.is_paused()
    path.write_text('{"paused": true}')
    assert asked.is_paused()
    path.write_bytes(content)
    assert asked.is_paused() == (content not in (b'{"paused": 1}', b'{"paused": "yes"}'))


def test_links_and_folders_are_no_requests(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text('{"paused": true}')
    for number, make in enumerate(
        (lambda at: at.symlink_to(elsewhere), lambda at: at.mkdir(), os.mkfifo)
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / control.CONTROL_FILE)
        assert not control.Asked(folder).is_paused()


def test_without_a_thread_nobody_could_go_on(model: Path, tmp_path: Path) -> None:
    with hooks_only(tmp_path, thread=False):
        scheduler = scheduler_for(model, SETTING)
        session = only_session(tmp_path)
        ask(session, paused=True)
        (recording,) = recorder._living()
        scheduler.schedule()
        assert (recording.wants_pause, recording.is_paused) == (False, False)


def test_a_pool_that_does_not_list_its_blocks(model: Path, tmp_path: Path) -> None:
    """One line, and the recording goes on."""
    with said() as lines, hooks_only(tmp_path):
        scheduler = scheduler_for(model, SETTING)
        session = only_session(tmp_path)
        blocks = vars(scheduler.kv_cache_manager.block_pool).pop("blocks")
        (recording,) = recorder._living()
        for _ in range(3):
            recording.wants_pause = True
            scheduler.schedule()
            assert not recording.is_paused
        scheduler.kv_cache_manager.block_pool.blocks = blocks
        del scheduler
    assert lines == ["profilemate: engine 0: the recording cannot be paused with this block pool"]
    assert make_tables(session, tmp_path / "tables").metadata["complete"]


def test_a_recording_that_cannot_go_on(model: Path, tmp_path: Path) -> None:
    """One line, and vLLM goes on; what came before the pause stays."""
    clock = Clock()
    with said() as lines, Oracle().watching() as oracle, hooks_only(tmp_path, clock, thread=False):
        driver = Driver(scheduler_for(model, SETTING), oracle, clock, SETTING)
        session = only_session(tmp_path)
        (recording,) = recorder._living()
        operations = busy()
        for number, operation in enumerate(operations[:60]):
            recording.wants_pause = 20 <= number < 30
            if number == 30:
                pool = driver.scheduler.kv_cache_manager.block_pool
                blocks, pool.blocks = pool.blocks, None
                driver.do(Steps(1))
                pool.blocks = blocks
            driver.do(operation)
        driver.drain()
    (line,) = lines
    assert line.startswith("profilemate: engine 0: recording stopped, resuming failed (TypeError")
    tables = make_tables(session, tmp_path / "tables")
    assert not tables.metadata["complete"]
    ((begin, end),) = tables.metadata["processes"][0]["pauses"]
    assert end is None
    assert max(row["timestamp_sec"] for row in tables.rows("scheduler_steps.csv")) <= begin


def test_what_was_lost_before_stays_lost(model: Path, tmp_path: Path) -> None:
    """It is said once, and the rest is recorded after the pause, too."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    clock = Clock()
    with (
        pytest.MonkeyPatch.context() as patch,
        said() as lines,
        Oracle().watching() as oracle,
        hooks_only(tmp_path, clock, thread=False),
    ):
        remove(patch, KVCacheManager, "get_computed_blocks")
        driver = Driver(scheduler_for(model, SETTING), oracle, clock, SETTING)
        session = only_session(tmp_path)
        (recording,) = recorder._living()
        for number, operation in enumerate(busy()[:80]):
            recording.wants_pause = 40 <= number < 50
            driver.do(operation)
        driver.drain()
    (line,) = lines
    assert "no longer recorded: prefix_cache_lookups.csv" in line
    tables = make_tables(session, tmp_path / "tables")
    (process,) = tables.metadata["processes"]
    assert (process["mismatches"], set(process["lost"])) == (0, {"lookups"})
    ((_, end),) = process["pauses"]
    assert not tables.rows(_LOOKUPS)
    for table in (_USAGE, _EVICTIONS, "kv_cache_allocations.csv"):
        assert max(row["timestamp_sec"] for row in tables.rows(table)) > end
