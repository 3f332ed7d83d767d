# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from analysis import open_session
from analysis.pool import pressure, usage
from analysis.requests import waiting
from analysis.requests.waiting import Waiting
from analysis.tables import facts
from tests.analysis.builder import METADATA, SessionBuilder

SCHEDULER = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 100,
    "chunked_prefill": True,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
}
TWO_GROUPS = [
    {"kind": "FullAttentionSpec", "block_size": 16},
    {"kind": "SlidingWindowSpec", "block_size": 16},
]


def waiting_of(session: SessionBuilder, after_sec: float = 0.0) -> Waiting:
    opened = open_session(session.folder, after_sec=after_sec)
    return waiting.measure(
        opened, facts.read(opened), usage.measure(opened), pressure.states(opened)
    )


def seconds(found: Waiting) -> dict[str, float]:
    return {name: round(reason.request_sec, 6) for name, reason in found.by_reason.items()}


def step(time: float, running: int, waiting: int, tokens: int = 1, **other: Any) -> dict[str, Any]:
    return {
        "timestamp_sec": time,
        "step": round(time * 1000),
        "running_reqs": running,
        "waiting_reqs": waiting,
        "scheduled_tokens": tokens,
        "scheduled_reqs": running,
        "schedule_us": 100,
        **other,
    }


def refused(time: float, tokens: int, lookups: int = 1, **other: Any) -> dict[str, Any]:
    """A lookup in the step that ends 50 us after it."""
    return {
        "timestamp_sec": time - 0.00005,
        "request_id": "head",
        "query_tokens": tokens,
        "hit_tokens": 0,
        "admitted": 0,
        "lookups": lookups,
        **other,
    }


def test_each_step_has_one_reason_until_the_next(session: SessionBuilder) -> None:
    """Pool of 100 blocks of 16 tokens; 80 are held from second 5 on.

    1 s: 100 of 100 tokens given out, two wait for 1 s. 2 s: four run, three wait for 2 s.
    4 s: a request is preempted, one waits for 1 s. 5 s: 500 tokens need 32 blocks, 20 are left,
    and its next 10 tokens need one. 6 s: the same with 300 tokens of the step left, which need 19;
    the pool holds 82. 7 s: needs more than the pool has. 8 s: nobody waits.
    """
    session.metadata(scheduler={**SCHEDULER, "max_num_batched_tokens": 400})
    session.usage((0, 40), (5, 80), (6, 82))
    session.rows(
        "scheduler_steps.csv",
        step(1, 2, 2, 400),
        step(2, 4, 3, 90),
        step(4, 3, 1, 90, preempted_reqs=1),
        step(5, 3, 1, 390),
        step(6, 3, 1, 100),
        step(7, 3, 1, 100),
        step(8, 3, 0, 100),
    )
    session.lookups(
        refused(5, 500), refused(6, 500, kind="retry"), refused(7, 1601, request_id="huge")
    )
    found = waiting_of(session)
    assert seconds(found) == {
        "max_num_seqs": 6,
        "token_budget": 2,
        "never_fits": 1,
        "no_blocks": 1,
        "preempting": 1,
        "whole_prompt": 1,
    }
    assert (found.request_sec, found.waited_sec, found.most) == (12, 7, 3)
    assert found.by_reason["max_num_seqs"].share == 0.5
    assert found.by_reason["max_num_seqs"].usage_pct == 40
    assert found.by_reason["whole_prompt"].usage_pct == 80


def test_the_watermark_is_a_share_of_all_blocks_and_only_while_others_run(
    session: SessionBuilder,
) -> None:
    """10 % of 101 blocks are 10: with 50 free, 40 fit beside them, 41 do not. With nothing
    running there is no watermark, and no reason in the tables."""
    session.metadata(scheduler={**SCHEDULER, "watermark": 0.1, "max_num_batched_tokens": 2000})
    session.usage((0, 50))
    session.rows("scheduler_steps.csv", step(1, 1, 1), step(3, 0, 1, 0), step(4, 1, 0))
    session.lookups(refused(1, 641), refused(3, 641, kind="retry"))
    assert seconds(waiting_of(session)) == {"watermark": 2, "not_known": 1}


def test_hits_that_others_hold_need_no_room(session: SessionBuilder) -> None:
    """640 tokens need 40 blocks. 160 of them are found: with 35 free the 30 others fit in all
    cases but for the ten found ones, which nobody held then."""
    session.metadata(scheduler=SCHEDULER)
    session.usage((0, 65), (2, 71))
    session.rows("scheduler_steps.csv", step(1, 1, 1, 10), step(2, 1, 1, 10), step(3, 1, 0))
    session.lookups(
        refused(1, 640, hit_tokens=160),
        refused(2, 640, hit_tokens=160, kind="retry"),
    )
    assert seconds(waiting_of(session)) == {"whole_prompt": 2}


def test_the_watermark_where_nobody_holds_the_hit(session: SessionBuilder) -> None:
    """480 tokens need 30 blocks, of which ten are found. 35 are free: only if the found ones are
    among them do 30 and the watermark's ten not fit."""
    session.metadata(scheduler={**SCHEDULER, "watermark": 0.1})
    session.usage((0, 65))
    session.rows("scheduler_steps.csv", step(1, 1, 1, 10), step(2, 1, 0))
    session.lookups(refused(1, 480, hit_tokens=160))
    assert seconds(waiting_of(session)) == {"watermark": 1}


def test_a_head_that_was_admitted_is_no_longer_the_head(session: SessionBuilder) -> None:
    """One row says that huge was looked up in seconds 1, 3 and 4. In second 2 one that had been
    preempted stood before it; that was admitted in second 3."""
    session.metadata(scheduler=SCHEDULER)
    session.usage((0, 90))
    session.rows("scheduler_steps.csv", *(step(time, 1, 1, 10) for time in (1, 2, 3, 4)))
    session.rows("scheduler_steps.csv", step(5, 1, 0))
    back = {"request_id": "back", "kind": "resumed"}
    session.lookups(
        refused(1, 1601, lookups=3, request_id="huge"),
        refused(2, 320, **back),
        refused(3, 320, **back, admitted=1),
    )
    assert seconds(waiting_of(session)) == {"never_fits": 3, "whole_prompt": 1}


def test_idle_steps_without_a_lookup_are_a_pause(session: SessionBuilder) -> None:
    """A row of 1,000 steps from 1 s to 3 s, of which 250 looked the head up: a quarter. Its
    320 tokens need 20 blocks, the 100 of a step seven; ten are free."""
    session.metadata(scheduler=SCHEDULER)
    session.usage((0, 90))
    session.rows("scheduler_steps.csv", step(1, 0, 2, 0, repeats=1000), step(3, 1, 0))
    session.lookups(refused(1, 320), refused(1.5, 320, 249, kind="retry"))
    assert seconds(waiting_of(session)) == {"paused": 3, "whole_prompt": 1}


def test_an_adapter_a_connector_and_what_no_table_says(session: SessionBuilder) -> None:
    """Adapters a and b run from 1 s and 2 s on, b until 4 s; nobody is looked up until 6 s."""
    steps = [step(time, 1, 1) for time in (1, 2, 4, 5)]
    session.rows("scheduler_steps.csv", *steps, step(6, 1, 0))
    session.requests(
        {"request_id": "1", "timestamp": 500, "queue_sec": 0.5, "finish_sec": 9, "lora": "a"},
        {"request_id": "2", "timestamp": 500, "queue_sec": 1.5, "finish_sec": 4, "lora": "b"},
        {"request_id": "3", "timestamp": 500, "queue_sec": 1.5, "finish_sec": 3, "lora": "a"},
    )
    session.metadata(scheduler={**SCHEDULER, "max_loras": 2})
    assert seconds(waiting_of(session)) == {"lora": 2, "not_known": 3}
    session.metadata(scheduler={**SCHEDULER, "connector": "NixlConnector"})
    assert seconds(waiting_of(session)) == {"connector": 5}
    session.metadata()
    assert seconds(waiting_of(session)) == {"not_known": 5}


def test_several_groups_do_not_show_which_rule_of_blocks_it_was(session: SessionBuilder) -> None:
    session.metadata(groups=TWO_GROUPS, scheduler=SCHEDULER)
    session.usage((0, 90))
    session.rows("scheduler_steps.csv", step(1, 1, 1), step(2, 1, 0))
    session.lookups(refused(1, 1000))
    assert seconds(waiting_of(session)) == {"blocks": 1}


def test_slots_for_drafts_spend_the_step(session: SessionBuilder) -> None:
    """Nine requests of one token and ten slots each: 99 of 100, no room for another's."""
    session.metadata(scheduler={**SCHEDULER, "max_num_seqs": 99, "draft_slots": 10})
    session.rows("scheduler_steps.csv", step(1, 9, 1, 9), step(2, 8, 1, 8), step(3, 1, 0))
    assert seconds(waiting_of(session)) == {"not_known": 1, "token_budget": 1}


def test_nobody_waited(session: SessionBuilder) -> None:
    session.rows("scheduler_steps.csv", step(1, 9, 0, 9))
    assert waiting_of(session) == Waiting(0, 0, 0, {})


def test_warm_up_is_left_out_but_lookups_in_it_count(session: SessionBuilder) -> None:
    """Of the 4 s from 1 s on, those after 2.5 s; the head was looked up before. The 90 tokens that
    are left of a step need six blocks, five are free."""
    session.metadata(scheduler=SCHEDULER)
    session.usage((0, 95))
    busy = [step(time, 1, 2, 10) for time in (1, 2, 3, 4)]
    session.rows("scheduler_steps.csv", *busy, step(5, 1, 0))
    session.lookups(refused(1, 960, 4))
    found = waiting_of(session, after_sec=2.5)
    assert seconds(found) == {"no_blocks": 5}
    assert (found.request_sec, found.waited_sec) == (5, 2.5)


@pytest.mark.usefixtures("small_chunks")
def test_a_table_is_the_same_in_chunks(session: SessionBuilder) -> None:
    """600 steps of either engine, 10 ms apart. Engine 0: of three steps one spends its tokens and
    two refuse the head; one row a second stands for its lookups. Engine 1: no places."""
    session.metadata(scheduler=SCHEDULER, ended_at="2026-01-31T12:00:06Z")
    session.usage((0, 95))
    session.usage((0, 20), engine=1)
    for number in range(600):
        time = number / 100
        tokens = 100 if number % 3 == 0 else 90
        session.rows("scheduler_steps.csv", step(time, 2, 1, tokens))
        session.rows("scheduler_steps.csv", step(time, 4, 2, 4, engine=1))
    for second in range(6):
        # 100 steps a second, the first of which spends its tokens in seconds 0 and 3 alone.
        began = [0.01, 1.0, 2.0, 3.01, 4.0, 5.0][second]
        count = sum(number % 3 != 0 for number in range(100 * second, 100 * second + 100))
        session.lookups(refused(began, 960, count, kind="retry" if second else "first"))
    found = waiting_of(session)
    assert seconds(found) == {"max_num_seqs": 12, "whole_prompt": 4, "token_budget": 2}
    assert found.by_reason["max_num_seqs"].usage_pct == 20
    assert found.by_reason["token_budget"].usage_pct == 95
    assert (found.waited_sec, found.most) == (12, 2)


def test_metadata_may_say_nothing(session: SessionBuilder) -> None:
    session.rows("scheduler_steps.csv", step(1, 9, 1, 0, scheduled_reqs=0), step(2, 1, 0))
    (session.folder / "metadata.json").unlink()
    assert seconds(waiting_of(session)) == {"paused": 1}
    assert "scheduler" not in METADATA
