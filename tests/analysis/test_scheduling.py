# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.pool import pressure
from analysis.renderers.text.summary import render
from analysis.requests import scheduling
from analysis.requests.scheduling import EncoderInputs, PerStep, Pressure, Scheduling
from tests.analysis.builder import SessionBuilder


def scheduling_of(session: SessionBuilder, after_sec: float = 0.0) -> Scheduling:
    opened = open_session(session.folder, after_sec=after_sec)
    return scheduling.measure(opened, pressure.states(opened))


def step(time: float, prefill: int, decode: int, requests: int, **other: Any) -> dict[str, Any]:
    return {
        "timestamp_sec": time,
        "scheduled_tokens": prefill + decode,
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "scheduled_reqs": requests,
        "schedule_us": 100 * requests,
        **other,
    }


def request(arrived: float, queued: float, first: float, finish: float) -> dict[str, Any]:
    """A request by its seconds from its arrival on."""
    return {
        "timestamp": arrived * 1000,
        "queue_sec": queued,
        "first_token_sec": arrived + first,
        "finish_sec": arrived + finish,
    }


def test_steps_by_kind_and_size(session: SessionBuilder) -> None:
    session.rows(
        "scheduler_steps.csv",
        step(1, 100, 0, 1),
        step(2, 50, 2, 3),
        step(3, 0, 3, 3),
        step(4, 0, 3, 3),
        step(5, 0, 0, 0, repeats=7),
    )
    found = scheduling_of(session)
    assert (found.steps, found.idle_steps) == (4, 7)
    assert (found.prefill_steps, found.mixed_steps, found.decode_steps) == (1, 1, 2)
    assert found.requests == PerStep(mean=2.5, p50=3, p95=3, p99=3, max=3)
    # Of 3, 3, 52 and 100 half are at most 3.
    assert found.tokens == PerStep(mean=39.5, p50=3, p95=100, p99=100, max=100)
    assert found.schedule_us == PerStep(mean=250, p50=300, p95=300, p99=300, max=300)


def test_what_arrives_at_a_full_pool_waits(session: SessionBuilder) -> None:
    """Under 40 % until 2 s, 95 % until 6 s, then 40 %: which is not under 40."""
    session.usage((1, 10), (2, 95), (6, 40))
    session.requests(
        request(0.5, 0.1, 0.2, 1),
        request(1.5, 0.3, 0.4, 1),
        request(2, 3, 3.5, 4),
        request(5.9, 1, 1.5, 2),
        request(7, 0.5, 0.6, 1),
        {"timestamp": 8000, "finish_sec": 9},
    )
    session.rows(
        "scheduler_steps.csv",
        step(1, 10, 0, 1),
        step(2, 0, 2, 2, preempted_reqs=1),
        step(3, 0, 4, 4, preempted_reqs=2),
        step(4, 0, 0, 0, preempted_reqs=1),
    )
    found = scheduling_of(session)
    low, middle, high = found.by_pressure
    assert (low.band, low.arrived, low.steps, low.preemptions) == ("under_40", 2, 1, 0)
    assert low.queued_p50_sec == pytest.approx(0.2)
    assert low.queued_p95_sec == pytest.approx(0.1 + 0.95 * 0.2)
    assert low.first_token_p50_sec == pytest.approx(0.3)
    assert (middle.band, middle.arrived, middle.queued_p95_sec) == ("from_40_to_60", 2, 0.5)
    assert (high.band, high.steps, high.mean_requests, high.mean_tokens) == ("over_90", 2, 3, 3)
    assert (high.preemptions, high.arrived, high.queued_p50_sec) == (4, 2, 2)
    assert (found.queued.count, found.first_token.count, found.finish.count) == (5, 5, 6)
    assert (found.queued.p50_sec, found.queued.max_sec) == (0.5, 3)
    assert found.finish.p50_sec == pytest.approx(1)


def test_engines_have_pools_of_their_own(session: SessionBuilder) -> None:
    session.usage((0, 95))
    session.usage((0, 5), engine=1)
    session.rows("scheduler_steps.csv", step(1, 0, 4, 4), step(1, 0, 2, 2, engine=1))
    bands = [(part.band, part.mean_tokens) for part in scheduling_of(session).by_pressure]
    assert bands == [("under_40", 2), ("over_90", 4)]


def test_warm_up_is_left_out_but_the_state_that_it_left_holds(session: SessionBuilder) -> None:
    session.usage((1, 95))
    session.rows("scheduler_steps.csv", step(2, 0, 9, 9), step(4, 0, 4, 4))
    session.requests(request(2, 1, 1, 1), request(4, 2, 2, 2))
    found = scheduling_of(session, after_sec=3)
    assert found.steps == found.queued.count == 1
    assert found.by_pressure == (Pressure("over_90", 1, 4, 4, 0, 1, 2, 2, 2, 2),)


@pytest.mark.usefixtures("small_chunks")
def test_tables_are_the_same_in_chunks(session: SessionBuilder) -> None:
    """500 steps of 1, 2, ... 100 requests five times; half of them at 50 % usage."""
    session.usage((0, 0), (2.5, 50))
    session.rows(
        "scheduler_steps.csv",
        *(step(number / 100, 0, number % 100 + 1, number % 100 + 1) for number in range(500)),
    )
    found = scheduling_of(session)
    assert found.tokens == PerStep(mean=50.5, p50=50, p95=95, p99=99, max=100)
    assert [(part.band, part.steps) for part in found.by_pressure] == [
        ("under_40", 250),
        ("from_40_to_60", 250),
    ]


def test_nothing_scheduled_is_nothing_said(session: SessionBuilder) -> None:
    found = scheduling_of(session)
    assert (found.steps, found.requests, found.queued.p50_sec, found.by_pressure) == (
        0,
        None,
        None,
        (),
    )


def test_tokens_by_phase(session: SessionBuilder) -> None:
    session.rows(
        "scheduler_steps.csv",
        step(1, 100, 0, 1),
        step(2, 50, 0, 1),
        step(3, 40, 3, 4),
        step(4, 0, 7, 7),
        step(5, 0, 7, 7),
        step(6, 0, 1, 1),
        step(7, 0, 0, 0),
    )
    prefill, mixed, decode = scheduling_of(session).by_phase
    assert (prefill.phase, prefill.steps) == ("prefill", 2)
    assert (prefill.prefill_tokens, prefill.decode_tokens) == (150, 0)
    assert prefill.tokens == PerStep(75, 50, 100, 100, 100)
    assert (mixed.phase, mixed.steps) == ("mixed", 1)
    assert (mixed.prefill_tokens, mixed.decode_tokens) == (40, 3)
    assert (decode.phase, decode.steps, decode.decode_tokens) == ("decode", 3, 15)
    assert decode.tokens == PerStep(5, 7, 7, 7, 7)
    # Of one phase alone there is nothing to set apart.
    assert [each.phase for each in scheduling_of(session, after_sec=3.5).by_phase] == ["decode"]


def test_what_the_encoder_got(session: SessionBuilder) -> None:
    session.rows(
        "scheduler_steps.csv",
        step(1, 100, 0, 1, encoder_items=2, encoder_tokens=60),
        step(2, 50, 0, 1, encoder_items=0, encoder_tokens=0),
        step(3, 40, 3, 4, encoder_items=1, encoder_tokens=30),
    )
    assert scheduling_of(session).encoder == EncoderInputs(2, 3, 90)
    session.rows("scheduler_steps.csv", step(4, 9, 0, 1, encoder_items=1))
    assert scheduling_of(session).encoder == EncoderInputs(3, 4, None)


def test_a_session_before_the_encoder_was_counted(session: SessionBuilder) -> None:
    session.rows("scheduler_steps.csv", step(1, 100, 0, 1))
    assert scheduling_of(session).encoder is None


def test_phases_and_encoder_in_the_summary(session: SessionBuilder) -> None:
    session.rows(
        "scheduler_steps.csv",
        step(1, 1000, 0, 1, encoder_items=2, encoder_tokens=600),
        step(2, 0, 7, 7),
    )
    text = render(summarize(open_session(session.folder)))
    section = text.partition("\nScheduling\n")[2].partition("\n\n")[0]
    for line in (
        "Encoder             2 items  in 1 step, 600 tokens",
        "Tokens by phase       steps  of prompts  of answers   a step",
        "Prefill alone             1       1,000           0  1,000.0",
        "Decode alone              1           0           7      7.0",
    ):
        assert line in section
