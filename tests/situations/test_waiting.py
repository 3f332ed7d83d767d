# SPDX-License-Identifier: Apache-2.0
"""Why requests wait, in the analyzer's words: situation 16, and the rules behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import analysis
from analysis.pool import pressure, usage
from analysis.requests import waiting
from analysis.requests.waiting import Waiting
from analysis.tables import facts
from profilemate import collector
from tests.kv import workload
from tests.kv.recording import Clock, only_session, recorded
from tests.kv.workload import Driver, Setting, scheduler_for
from tests.situations.bench import Bench, Engine, Tables
from tests.support.scheduler import tokens


def steps(engine: Engine, count: int = 1) -> None:
    """Steps of 10 ms whose results come 1 ms after they were scheduled."""
    for _ in range(count):
        output = engine.schedule(0.009)
        engine.wait(0.001)
        engine.update(output)


def waiting_of(folder: Path, after_sec: float = 0.0) -> Waiting:
    session = analysis.open_session(folder, after_sec=after_sec)
    return waiting.measure(
        session, facts.read(session), usage.measure(session), pressure.states(session)
    )


def request_seconds(tables: Tables) -> dict[str, float]:
    found = waiting_of(tables.folder)
    parts = {name: round(reason.request_sec, 6) for name, reason in found.by_reason.items()}
    assert sum(parts.values()) == pytest.approx(found.request_sec)
    assert sum(reason.share for reason in found.by_reason.values()) == pytest.approx(1)
    return parts


def test_prefill_only_traffic_waits_for_tokens_with_two_thirds_of_the_pool_free(
    bench: Bench,
) -> None:
    """Six requests of 512 tokens; a step takes 1,024, so two of them, 64 of 200 blocks. Four wait
    for 10 ms and then two for 10 ms."""
    engine = bench.engine(200, max_num_batched_tokens=1024)
    engine.add(*(bench.request(f"r{number}", tokens(number, 512), 1) for number in range(6)))
    steps(engine, 3)
    found = waiting_of(engine.end().folder)

    assert list(found.by_reason) == ["token_budget"]
    assert found.by_reason["token_budget"].request_sec == pytest.approx(0.06)
    assert found.by_reason["token_budget"].usage_pct == pytest.approx(32)
    assert found.most == 4
    assert found.waited_sec == pytest.approx(0.02)


def test_no_place_among_those_that_run(bench: Bench) -> None:
    """max_num_seqs 2: a, b, c and d end in steps 3, 4, 5 and 5, so two wait after each of the
    first three steps and one after the fourth."""
    engine = bench.engine(40, max_num_seqs=2)
    lengths = {"a": 3, "b": 4, "c": 2, "d": 1}
    engine.add(
        *(
            bench.request(name, tokens(number, 32), length)
            for number, (name, length) in enumerate(lengths.items())
        )
    )
    steps(engine, 5)
    assert request_seconds(engine.end()) == {"max_num_seqs": 0.07}


def test_the_whole_prompt_must_fit_though_its_chunk_would(bench: Bench) -> None:
    """a holds 30 of 63 blocks. b has 640 tokens (40 blocks) and a step takes 512 (32): there is
    room for its first chunk (33 free, one more taken by a in step 2), none for all of it. a's
    fourth token is its last: three steps, in the fourth b runs."""
    engine = bench.engine(63, max_num_batched_tokens=512)
    engine.add(bench.request("a", tokens(1, 480), 4))
    steps(engine)
    engine.add(bench.request("b", tokens(2, 640), 1))
    steps(engine, 5)
    tables = engine.end()
    assert request_seconds(tables) == {"whole_prompt": 0.03}
    assert tables.requests()["b"]["queue_sec"] == 0.039


def test_no_room_for_the_next_chunk(bench: Bench) -> None:
    """As above, with steps that would take all of b: its next chunk is its whole prompt."""
    engine = bench.engine(63)
    engine.add(bench.request("a", tokens(1, 480), 4))
    steps(engine)
    engine.add(bench.request("b", tokens(2, 640), 1))
    steps(engine, 5)
    assert request_seconds(engine.end()) == {"no_blocks": 0.03}


def test_the_watermark(bench: Bench) -> None:
    """10 % of 100 blocks stay free for those that run: b's 40 blocks would leave 9 of 49."""
    engine = bench.engine(99, watermark=0.1)
    engine.add(bench.request("a", tokens(1, 790), 4))
    steps(engine)
    engine.add(bench.request("b", tokens(2, 640), 1))
    steps(engine, 5)
    assert request_seconds(engine.end()) == {"watermark": 0.03}


def test_a_prompt_that_is_not_cut_up(bench: Bench) -> None:
    """Without chunked prefill b's 600 tokens do not fit beside a's 500 in a step of 1,000."""
    engine = bench.engine(
        200, max_num_batched_tokens=1000, max_model_len=1000, enable_chunked_prefill=False
    )
    engine.add(bench.request("a", tokens(1, 500), 1), bench.request("b", tokens(2, 600), 1))
    steps(engine, 2)
    assert request_seconds(engine.end()) == {"no_chunking": 0.01}


def test_a_head_that_can_never_run_and_who_waits_behind_it(bench: Bench) -> None:
    """huge needs 64 of 63 blocks; with small behind it two wait for 100 steps, until huge is
    aborted 9 ms before the next one."""
    engine = bench.engine(63)
    engine.add(bench.request("huge", tokens(1, 1010), 1), bench.request("small", tokens(2, 16), 1))
    steps(engine, 100)
    engine.abort("huge")
    steps(engine)
    assert request_seconds(engine.end()) == {"never_fits": 2.0}


def test_no_slot_for_another_adapter(bench: Bench) -> None:
    """One adapter at a time: b waits for the three steps of a."""
    from vllm.lora.request import LoRARequest

    engine = bench.engine(20, enable_lora=True, max_loras=1)
    for number, name in enumerate("ab", start=1):
        lora = LoRARequest(f"adapter {name}", number, "adapter")
        engine.add(bench.request(name, tokens(number, 32), 3, lora_request=lora))
    steps(engine, 6)
    tables = engine.end()
    assert tables.metadata["scheduler"]["max_loras"] == 1
    assert request_seconds(tables) == {"lora": 0.03}


def test_a_paused_engine(bench: Bench) -> None:
    """Ten steps with a request that can never run, 1,000 while the engine is paused, ten more:
    lookups are counted against steps, so the pause shows though the steps look alike."""
    from vllm.v1.core.sched.interface import PauseState

    engine = bench.engine(63)
    engine.add(bench.request("huge", tokens(1, 1010), 1))
    steps(engine, 10)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    steps(engine, 1000)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    steps(engine, 10)
    found = request_seconds(engine.end())
    assert found["paused"] == pytest.approx(10.0, abs=0.02)
    assert found["never_fits"] == pytest.approx(0.2, abs=0.02)


def test_a_preempted_request_waits_for_the_one_that_took_its_blocks(bench: Bench) -> None:
    """The recompute tax (test_usage): b is preempted in step 18, which admits none, and is looked
    up in vain in steps 19 to 49: it needs six blocks, four or three are free."""
    engine = bench.engine(10)
    engine.add(bench.request("a", tokens(1, 64), 49), bench.request("b", tokens(2, 64), 20))
    steps(engine, 52)
    assert request_seconds(engine.end()) == {"no_blocks": 0.31, "preempting": 0.01}


def test_without_a_prefix_cache_the_head_is_who_was_admitted_next(bench: Bench) -> None:
    """Nothing is looked up, so the next request to be admitted is taken for the head."""
    engine = bench.engine(63, max_num_batched_tokens=512, enable_prefix_caching=False)
    engine.add(bench.request("a", tokens(1, 480), 4))
    steps(engine)
    engine.add(bench.request("b", tokens(2, 640), 1))
    steps(engine, 5)
    assert request_seconds(engine.end()) == {"whole_prompt": 0.03}


def test_warm_up_is_left_out(bench: Bench) -> None:
    """Of the 30 ms from step 2 (19 ms) on, in which b waits, those from 32 ms on."""
    engine = bench.engine(63)
    engine.add(bench.request("a", tokens(1, 480), 4))
    steps(engine)
    engine.add(bench.request("b", tokens(2, 640), 1))
    steps(engine, 5)
    tables = engine.end()
    found = waiting_of(tables.folder, after_sec=0.032)
    assert found.by_reason["no_blocks"].request_sec == pytest.approx(0.017)


@contextmanager
def judging(times: list[tuple[int, int, str]]) -> Iterator[None]:
    """Note what every ``schedule()`` leaves waiting and why, as the scheduler itself stands then:
    time, requests that wait, reason."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        import time

        preempted = sum(request.num_preemptions for request in self.requests.values())
        output = original(self, *args, **kwargs)
        again = sum(request.num_preemptions for request in self.requests.values())
        count = self.get_request_counts()[1]
        times.append((time.monotonic_ns(), count, _judge(self, output, again > preempted)))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", schedule)
        yield


def _judge(scheduler: Any, output: Any, preempted: bool) -> str:
    if preempted:
        return "preempting"
    left = scheduler.max_num_scheduled_tokens - output.total_num_scheduled_tokens
    if not left:
        return "token_budget"
    if len(scheduler.running) >= scheduler.max_num_running_reqs:
        return "max_num_seqs"
    if not scheduler.waiting:
        return ""
    head = scheduler.waiting.peek_request()
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if -(-head.num_tokens // scheduler.block_size) > pool.num_gpu_blocks - 1:
        return "never_fits"
    blocks, hit = manager.empty_kv_cache_blocks.blocks, 0
    if not head.skip_reading_prefix_cache:
        blocks, hit = manager.coordinator.find_longest_cache_hit(
            head.block_hashes, head.num_tokens - 1
        )[:2]

    def room_for(count: int) -> bool:
        needed = manager.coordinator.get_num_blocks_to_allocate(
            request_id=head.request_id,
            num_tokens=count,
            new_computed_blocks=blocks,
            num_encoder_tokens=0,
            total_computed_tokens=hit,
            num_local_computed_tokens=hit,
            num_tokens_main_model=count,
        )
        return bool(needed <= pool.get_num_free_blocks())

    if not room_for(min(hit + left, head.num_tokens)):
        return "no_blocks"
    assert not room_for(head.num_tokens)
    return "whole_prompt"


ROOM = ("no_blocks", "whole_prompt")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    setting=st.builds(
        Setting,
        blocks=st.integers(6, 40),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([16, 48, 512]),
        policy=st.sampled_from(["fcfs", "priority"]),
        block_size=st.sampled_from([4, 16]),
    ),
    operations=st.lists(
        st.one_of(workload.adds, workload.adds, workload.steps), min_size=10, max_size=40
    ),
)
def test_reasons_are_those_that_stand_in_the_scheduler(
    model: Path,
    hooks_on: None,
    tmp_path_factory: pytest.TempPathFactory,
    setting: Setting,
    operations: list[workload.Operation],
) -> None:
    """Random workloads. Whether the next chunk or only the whole prompt had no room is left open
    by hits that others may hold: the two are compared as one. Idle steps that are one row
    share its time evenly, though some took longer."""
    folder, clock = tmp_path_factory.mktemp("session"), Clock()
    times: list[tuple[int, int, str]] = []
    with judging(times), recorded(folder / "sessions", clock) as oracle:
        driver = Driver(scheduler_for(model, setting), oracle, clock, setting)
        driver.run(operations)
    times.append((clock.now, 0, ""))
    session = only_session(folder / "sessions")
    collector.finalize(session)
    expected: dict[str, float] = defaultdict(float)
    for (began, count, reason), (ended, _, _) in pairwise(times):
        expected[reason] += count * (ended - began) / 1e9
    expected["room"] = sum(expected.pop(name, 0) for name in ROOM)

    found = waiting_of(session)
    by_reason = {name: reason.request_sec for name, reason in found.by_reason.items()}
    by_reason["room"] = sum(by_reason.pop(name, 0) for name in ROOM)
    for reason in {*by_reason, *expected}:
        assert by_reason.get(reason, 0) == pytest.approx(expected[reason], abs=0.005)
