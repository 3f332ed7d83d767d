# SPDX-License-Identifier: Apache-2.0
"""Requests that wait, some of them for ever: situation 17, and the rules that make them wait."""

from __future__ import annotations

from pathlib import Path

import analysis
from analysis.pool import usage
from analysis.requests import admission, preemption_steps
from analysis.requests.admission import PreemptsItself
from analysis.tables import facts
from tests.situations.bench import Bench, size_of, total
from tests.support.scheduler import tokens

MILLISECOND = 0.001
"""vLLM's pause after a step that had nothing to do."""


def test_twenty_thousand_lookups_of_a_request_that_can_never_run(bench: Bench) -> None:
    """1,010 tokens need 64 blocks; of the pool's 64 blocks one is the null block, so 63 are
    usable. vLLM admits a request only when its whole prompt fits, and admits no other before it:
    the small one behind it, which would fit, is never looked at.
    """
    engine = bench.engine(63)
    engine.add(bench.request("huge", tokens(1, 1010), 1), bench.request("small", tokens(2, 16), 1))
    engine.step(20_000, seconds=MILLISECOND)
    recorded = size_of(engine.folder)
    engine.abort("huge")
    engine.step()
    tables = engine.end()

    assert recorded < 1_000_000
    assert recorded + size_of(engine.folder) < 1_000_000
    assert tables.metadata["cost"]["journal_bytes"] + size_of(engine.folder) < 1_000_000
    assert tables.lookups(request_id="huge") == [
        ("huge", 1010, 0, "first", 0, 1),
        ("huge", 1010, 0, "retry", 0, 19_999),
    ]
    # One row a second: the request shows while it waits.
    times = [row[0] for row in tables.select("prefix_cache_lookups", "timestamp_sec")]
    assert 20 <= len(times) <= 25
    idle = tables.steps("waiting_reqs", "scheduled_tokens", "repeats", scheduled_reqs=0)
    assert {row[:2] for row in idle} == {(2, 0)}
    assert total(idle) == 20_000
    assert 20 <= len(idle) <= 25
    assert tables.steps("step", "scheduled_reqs", "repeats", waiting_reqs=0) == [(20_001, 1, 1)]

    # As soon as the huge one is gone, the small one is looked up, once, and runs.
    assert tables.lookups(request_id="small") == [("small", 16, 0, "first", 1, 1)]
    rows = tables.requests()
    assert (rows["huge"]["finish_reason"], rows["huge"]["queue_sec"]) == ("abort", None)
    assert rows["small"]["queue_sec"] == 20.01
    found = analysis.summarize(analysis.open_session(tables.folder)).admission
    assert (found.looked_up, found.never_admitted, found.too_large) == (2, 1, 1)
    (too_large,) = found.largest
    assert (too_large.request_id, too_large.lookups) == ("huge", 20_000)
    assert (too_large.tokens, too_large.needed_blocks, too_large.usable_blocks) == (1010, 64, 63)


def test_an_engine_killed_while_it_waits_loses_a_quarter_second_of_lookups_at_most(
    bench: Bench, tmp_path: Path
) -> None:
    """Steps that repeat the last one are recorded four times a second."""
    engine = bench.engine(63)
    engine.add(bench.request("huge", tokens(1, 1010), 1))
    engine.step(10_000, seconds=MILLISECOND)
    killed = engine.tables_if_killed(tmp_path / "killed")
    found = total(killed.lookups())
    assert 10_000 - 251 <= found <= 10_000
    assert total(killed.steps("repeats")) == found
    assert total(engine.end().lookups()) == 10_000


def test_lookups_are_counted_to_the_last_one_when_another_request_arrives(bench: Bench) -> None:
    """The steps before an arrival are recorded together with the step after it."""
    engine = bench.engine(63)
    engine.add(bench.request("huge", tokens(1, 1010), 1))
    engine.step(100, seconds=MILLISECOND)
    for number in range(5):
        engine.add(bench.request(f"small{number}", tokens(2, 16), 1))
        engine.step(10, seconds=MILLISECOND)
    tables = engine.end()

    assert tables.lookups() == [
        ("huge", 1010, 0, "first", 0, 1),
        ("huge", 1010, 0, "retry", 0, 149),
    ]
    waiting = tables.steps("step", "waiting_reqs", "repeats")
    assert waiting == [(1, 1, 100), *((101 + 10 * n, 2 + n, 10) for n in range(5))]


def test_the_first_lookup_has_a_row_apart_from_those_that_repeat_it(bench: Bench) -> None:
    """With one place (max_num_seqs 1) the huge request waits unseen for a to end in step 5. Then
    the steps are all the same, from its first lookup on."""
    engine = bench.engine(63, max_num_seqs=1)
    engine.add(bench.request("a", tokens(1, 16), 5), bench.request("huge", tokens(2, 1010), 1))
    engine.step(105, seconds=MILLISECOND)
    tables = engine.end()

    assert tables.lookups() == [
        ("a", 16, 0, "first", 1, 1),
        ("huge", 1010, 0, "first", 0, 1),
        ("huge", 1010, 0, "retry", 0, 99),
    ]
    assert total(tables.steps("repeats", scheduled_tokens=0)) == 100


def test_a_request_whose_adapter_has_no_slot_is_not_even_looked_up(bench: Bench) -> None:
    """One adapter at a time: b waits until a has ended, in step 3, and is looked up once."""
    from vllm.lora.request import LoRARequest

    engine = bench.engine(20, enable_lora=True, max_loras=1)
    engine.run(
        *(
            bench.request(
                name,
                tokens(number, 32),
                3,
                lora_request=LoRARequest(f"adapter {name}", number, "adapter"),
            )
            for number, name in enumerate("ab", start=1)
        )
    )
    tables = engine.end()

    assert tables.lookups() == [("a", 32, 0, "first", 1, 1), ("b", 32, 0, "first", 1, 1)]
    assert tables.steps("running_reqs", "waiting_reqs", step=3) == [(1, 1)]
    assert tables.requests()["b"]["queue_sec"] == 0.04


def test_requests_that_wait_for_a_place_are_not_looked_up(bench: Bench) -> None:
    """max_num_seqs 2: of 40 blocks six are held at most, and still c waits for a's end in step 3
    and d for b's in step 4. Each is looked up once, when it has its place."""
    engine = bench.engine(40, max_num_seqs=2)
    lengths = {"a": 3, "b": 4, "c": 2, "d": 1}
    engine.run(
        *(
            bench.request(name, tokens(number, 32), length)
            for number, (name, length) in enumerate(lengths.items())
        )
    )
    tables = engine.end()

    assert tables.lookups() == [(name, 32, 0, "first", 1, 1) for name in "abcd"]
    waiting = tables.steps("running_reqs", "waiting_reqs")
    assert waiting == [(2, 2), (2, 2), (2, 2), (2, 1), (2, 0)]
    queued = {name: row["queue_sec"] for name, row in tables.requests().items()}
    assert queued == {"a": 0.01, "b": 0.01, "c": 0.04, "d": 0.05}
    assert max(row[0] for row in tables.usage()) == 15.0


def test_the_watermark_keeps_a_request_waiting_though_it_would_fit(bench: Bench) -> None:
    """100 blocks and a watermark of 10 % keep 10 blocks free for those that run: a holds 50 of 99
    usable blocks, so a request of 40 blocks would leave 9 and waits, one of 39 would not."""
    engine = bench.engine(99, watermark=0.1)
    engine.add(bench.request("a", tokens(1, 790), 3))
    engine.step()
    engine.add(bench.request("b", tokens(2, 640), 1))
    engine.step()
    engine.abort("b")
    engine.add(bench.request("c", tokens(3, 624), 1))
    engine.run()
    tables = engine.end()

    assert tables.metadata["scheduler"]["watermark"] == 0.1
    assert tables.lookups() == [
        ("a", 790, 0, "first", 1, 1),
        ("b", 640, 0, "first", 0, 1),
        ("c", 624, 0, "first", 1, 1),
    ]
    assert tables.usage()[1] == (50.51, 50, 0, 49, 1, 1)


def test_without_the_rule_a_request_preempts_itself_for_ever(bench: Bench) -> None:
    """Admitted by its first chunk alone (32 blocks of 512 tokens), the request of 64 blocks finds
    31 left for its second and preempts itself, every second step. With a prefix cache it would
    find its first chunk again; without one it computes that again and again."""
    engine = bench.engine(
        63,
        max_num_batched_tokens=512,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    engine.add(bench.request("huge", tokens(1, 1010), 1))
    engine.step(100)
    engine.abort("huge")
    tables = engine.end()

    columns = ("scheduled_tokens", "prefill_tokens", "preempted_reqs")
    assert tables.steps(*columns) == [(512, 512, 0), (0, 0, 1)] * 50
    assert tables.moves() == [("allocate", 32, "huge", 0), ("free", 32, "huge", 0)] * 50
    huge = tables.requests()["huge"]
    assert (huge["preemptions"], huge["num_blocks"], huge["hash_ids"]) == (50, 0, [])
    assert tables.lookups() == []
    session = analysis.open_session(tables.folder)
    stepped = preemption_steps.read(session)
    found = admission.measure(session, facts.read(session), usage.measure(session), stepped)
    assert (found.looked_up, found.self_preempted) == (0, 1)
    assert found.circling == (PreemptsItself("huge", 0, 50),)


def test_a_paused_engine_looks_nothing_up(bench: Bench) -> None:
    """Looked up in ten steps, then 1,000 steps while the engine is paused, then ten more."""
    from vllm.v1.core.sched.interface import PauseState

    engine = bench.engine(63)
    engine.add(bench.request("huge", tokens(1, 1010), 1))
    engine.step(10, seconds=MILLISECOND)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step(1000, seconds=MILLISECOND)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step(10, seconds=MILLISECOND)
    tables = engine.end()

    assert tables.lookups() == [
        ("huge", 1010, 0, "first", 0, 1),
        ("huge", 1010, 0, "retry", 0, 19),
    ]
    assert total(tables.steps("repeats")) == 1020
