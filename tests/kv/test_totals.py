# SPDX-License-Identifier: Apache-2.0
"""totals.json of real schedulers: every figure is what the tables say, restarts or not."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analysis import open_session, summarize
from analysis.stats.histograms import BOUNDS_SEC
from profilemate.collector.engine import Engine
from profilemate.collector.engine_totals import EngineTotals, Held, PoolTotals
from profilemate.collector.follow import Follower
from profilemate.collector.requests import Finish, Request
from profilemate.collector.totals import Totals
from profilemate.format.totals import BANDS, TIMES_NS
from tests.kv import totals, workload
from tests.kv.recording import Clock, make_tables, only_session, recorded
from tests.kv.workload import Add, Driver, Operation, Reset, Setting, Steps, mixed, scheduler_for
from tests.support.oracle import Eviction, Oracle

pytestmark = pytest.mark.usefixtures("hooks_on")

MIXED = (
    Setting(blocks=24, max_num_seqs=4),
    # The session goes on after its last change.
    [*mixed(12, 3, 3), Steps(60), workload.Wait(300), Steps(2)],
)

examples = given(setting=workload.settings, operations=workload.operations)


class OddClock(Clock):
    """No time between two moments is a bound of a histogram, where the analyzer's subtractions of
    seconds may fall on either side."""

    def tick(self, microseconds: int = 1_000) -> None:
        super().tick(microseconds + 7)


def record(
    sessions: Path,
    model: Path,
    setting: Setting,
    operations: list[Operation],
    clock: Clock | None = None,
) -> Oracle:
    """Run the operations, and leave the session's journals under ``sessions``."""
    clock = clock or Clock()
    with recorded(sessions, clock) as oracle:
        Driver(scheduler_for(model, setting), oracle, clock, setting).run(operations)
    return oracle


def check(folder: Path, oracle: Oracle) -> None:
    """Every figure of the tables' folder."""
    preempted = sum(life.preemptions for life in oracle.lives.values())
    totals.check(folder, oracle.reuse_gaps, len(oracle.lives), preempted, regretted(oracle))


def regretted(oracle: Oracle) -> list[int]:
    """By pool: contents that got into a block again while they were remembered as lost: as many of
    each group as the pool has blocks. Nothing is left of a reset."""
    found = [0] * len(oracle.pools)
    lost: dict[tuple[int, bytes], list[bytes]] = {}
    done = 0
    for before, number, content in oracle.cached:
        for eviction in oracle.evictions[done:before]:
            of_group = lost.setdefault((eviction.pool, eviction.content[-4:]), [])
            if eviction.reason == "reset":
                of_group.clear()
            elif _is_lost(eviction):
                others = [each for each in of_group if each != eviction.content]
                blocks = oracle.pools[eviction.pool].num_gpu_blocks - 1
                of_group[:] = [*others, eviction.content][-blocks:]
        done = before
        of_group = lost.get((number, content[-4:]), [])
        if content in of_group:
            found[number] += 1
            of_group.remove(content)
    return found


def _is_lost(eviction: Eviction) -> bool:
    return eviction.reason == "reallocated" and not eviction.copies_left


def run(model: Path, setting: Setting, operations: list[Operation]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sessions = Path(folder)
        oracle = record(sessions, model, setting, operations)
        check(make_tables(only_session(sessions), sessions / "tables").folder, oracle)


@settings(max_examples=60)
@examples
@example(*MIXED)
def test_full_attention(model: Path, setting: Setting, operations: list[Operation]) -> None:
    run(model, setting, operations)


@settings(max_examples=30)
@examples
def test_beside_sliding_windows(model: Path, setting: Setting, operations: list[Operation]) -> None:
    run(model, replace(setting, groups="window", blocks=3 * setting.blocks), operations)


@settings(max_examples=30)
@examples
def test_beside_mamba_checkpoints(
    model: Path, setting: Setting, operations: list[Operation]
) -> None:
    run(model, replace(setting, groups="checkpoints", blocks=setting.blocks // 2 + 4), operations)


@pytest.mark.parametrize("groups", ["full", "window"])
@pytest.mark.parametrize("blocks", [20, 30])
def test_regrets(model: Path, tmp_path: Path, groups: str, blocks: int) -> None:
    """Prompts of four families come again after others; some are dropped by a reset before."""
    chance = random.Random(blocks)
    operations: list[Operation] = []
    for number in range(160):
        operations += [Add(chance.randrange(4), chance.randrange(60, 100), 20, 3), Steps(6)]
        if number % 40 == 30:
            operations += [Steps(60), Reset()]
    setting = Setting(blocks=blocks * (1 if groups == "full" else 3), groups=groups, max_num_seqs=2)
    oracle = record(tmp_path, model, setting, operations)
    check(make_tables(only_session(tmp_path), tmp_path / "tables").folder, oracle)
    assert sum(regretted(oracle)) > 10
    assert {each.reason for each in oracle.evictions} == {"reallocated", "reset"}


def restarted(follower: Follower, *, before: bool) -> None:
    """Have new totals go on where the follower's were, which get their state by way of JSON
    ``before`` the engines come, or after."""
    state = json.dumps(follower.totals.saved())
    follower.totals = new = Totals()
    if before:
        new.restore(json.loads(state))
    for producer in follower.producers.values():
        engine = producer.state
        if isinstance(engine, Engine):
            engine._session_totals = new
            engine._totals = new.engine(engine.rank, [pool.total for pool in engine._pools])
            engine._rows._totals = engine._totals
    if not before:
        new.restore(json.loads(state))
    assert json.dumps(new.saved()) == state


@settings(max_examples=40)
@given(
    setting=workload.settings,
    operations=workload.operations,
    moments=st.lists(st.tuples(st.integers(0, 2_000), st.booleans()), max_size=6),
)
@example(setting=MIXED[0], operations=MIXED[1], moments=[(20, True), (40, False), (90, True)])
def test_restarts_change_nothing(
    model: Path,
    setting: Setting,
    operations: list[Operation],
    moments: list[tuple[int, bool]],
) -> None:
    """A collector that is restarted at any moment, and writes the file at each, ends with the same
    figures. The moments are milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        sessions = Path(folder)
        oracle = record(sessions, model, setting, operations)
        target = sessions / "tables"
        target.mkdir()
        follower = Follower(only_session(sessions), target)
        follower.discover()
        while follower.read():
            pass
        for moment, before in sorted(moments):
            follower.apply(Clock().now + moment * 1_000_000)
            follower.write_totals(ended=False)
            restarted(follower, before=before)
        follower.close()
        check(target, oracle)


@settings(max_examples=200)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1]),
            st.integers(-3, 6),
            st.sampled_from([10, 20, 39, 40, 50, 90, 91]),
            st.booleans(),
        ),
        min_size=1,
    )
)
def test_pools_of_several_engines_whenever_they_are_added_up(
    changes: list[tuple[int, int, int, bool]],
) -> None:
    """Each change: the pool, the time since the last change of any, the blocks held, and whether
    what waits is added up then. The time of a damaged journal may go back."""
    everywhere = Held()
    pools = [PoolTotals(100), PoolTotals(100)]
    now, held, peak = 1_000, [0, 0], 0
    since, band = [now, now], [0, 0]
    band_ns = [[0] * len(BANDS) for _ in pools]
    for pool in pools:
        everywhere.changes.append((pool, now, "0.00", 0, 0))
    everywhere.fold()
    for number, passed, blocks, is_folded in changes:
        now += passed
        everywhere.changes.append((pools[number], now, f"{blocks:.2f}", blocks, 100 - blocks))
        held[number] = blocks
        peak = max(peak, sum(held))
        band_ns[number][band[number]] += max(0, now - since[number])
        since[number] = now
        band[number] = sum(blocks >= floor for floor in (40, 60, 80)) + (blocks > 90)
        if is_folded:
            everywhere.fold()
    everywhere.fold()
    assert (everywhere.held, everywhere.peak) == (sum(held), peak)
    assert [pool.band_ns for pool in pools] == band_ns
    assert [pool.held for pool in pools] == held
    assert [(pool.since, pool.band) for pool in pools] == list(zip(since, band, strict=True))


def test_the_analyzer_computes_the_same(model: Path, tmp_path: Path) -> None:
    """From the whole tables, by its own definitions. It leaves out what was lost on purpose."""
    setting, operations = MIXED
    others = [each for each in operations if not isinstance(each, Reset | workload.Evict)]
    record(tmp_path, model, setting, others, OddClock())
    folder = make_tables(only_session(tmp_path), tmp_path / "tables").folder
    summary = summarize(open_session(folder))
    found = totals.totals(folder)
    (engine,) = found["engines"]
    (pool,) = engine["pools"]

    true, prefix = summary.prefix_cache.true, engine["prefix_cache"]
    assert prefix["hit_tokens"] / prefix["query_tokens"] == true.token_rate != 0
    assert prefix["requests_hit"] / prefix["requests"] == true.request_rate
    assert prefix["external_hit_tokens"] == true.external_hit_tokens
    resumed, skipped = summary.prefix_cache.resumed, summary.prefix_cache.skipped
    assert prefix["resumed"] == vars(resumed)
    assert prefix["skipped"] == vars(skipped)

    (usage,) = summary.usage.pools
    time_ns = sum(pool["band_ns"].values())
    # The session's end is rounded once more there, as a moment of the day.
    assert abs(time_ns - round(usage.observed_sec * 1e6) * 1_000) <= 1_000
    assert usage.bands is not None
    for band, share in vars(usage.bands).items():
        assert pool["band_ns"][band] / time_ns == pytest.approx(share, abs=1e-5)
    assert pool["peak_held_blocks"] == usage.peak.held_blocks

    for name, spread in (
        ("lifetime", summary.lifetimes.lifetime),
        ("idle", summary.lifetimes.idle),
        ("evictable", summary.lifetimes.evictable),
    ):
        assert bins(engine["blocks"][name]) == [(bin.from_sec, bin.count) for bin in spread.bins]
        assert engine["blocks"][name]["sum"] / 1e9 == pytest.approx(spread.mean_sec * spread.count)
    assert sum(row["blocks"] for row in pool["evictions"]) == summary.evictions.total.blocks > 0
    steps = summary.scheduling
    assert [engine["steps"][name] for name in ("prefill", "mixed", "decode", "idle")] == [
        steps.prefill_steps,
        steps.mixed_steps,
        steps.decode_steps,
        steps.idle_steps,
    ]
    for name, spread in (
        ("queue", steps.queued),
        ("first_token", steps.first_token),
        ("duration", steps.finish),
    ):
        assert bins(engine["requests"][name]) == [(bin.from_sec, bin.count) for bin in spread.bins]
    assert engine["requests"]["finished"] == dict(summary.requests.by_reason)


def bins(histogram: totals.Found) -> list[tuple[float, int]]:
    """Lower bounds in seconds and counts, from the first bin to the last that has any."""
    lows = [0.0, *(bound / 1e9 for bound in histogram["bounds"])]
    pairs = list(zip(lows, histogram["counts"], strict=True))
    filled = [place for place, (_, count) in enumerate(pairs) if count]
    return pairs[filled[0] : filled[-1] + 1] if filled else []


def test_bounds_are_the_analyzers() -> None:
    assert tuple(bound / 1e9 for bound in TIMES_NS) == BOUNDS_SEC


def test_reuse_gaps_are_the_analyzers_where_prompts_come_in_one_step(
    model: Path, tmp_path: Path
) -> None:
    """The analyzer counts from the admission of the request that used the block before, as no table
    says when a block was filled. That is the same moment here."""
    setting = Setting(blocks=200, max_num_batched_tokens=512)
    operations: list[Operation] = []
    for number in range(12):
        operations += [Add(number % 3, 80, 10 + number, 1), Steps(2), workload.Wait(300)]
    record(tmp_path, model, setting, [*operations, Reset()], OddClock())
    folder = make_tables(only_session(tmp_path), tmp_path / "tables").folder
    at_hit = summarize(open_session(folder)).ages.at_hit
    found = totals.totals(folder)["engines"][0]["blocks"]["reuse_gap"]
    assert found["count"] == at_hit.count == 9 * 80 // 16
    assert bins(found) == [(bin.from_sec, bin.count) for bin in at_hit.bins]


def test_a_request_that_ends_before_it_arrives_took_no_time() -> None:
    """Two threads read the clock: no figure is below 0 for that."""
    engine = EngineTotals([10], Held())
    request = Request(1, "a", "a", 5, None, None, 0, [], arrived=200)
    engine.ended.append((request, Finish("abort", 5, 0, 0, 100)))
    assert engine.content(0, (), 300)["requests"]["duration"]["sum"] == 0
