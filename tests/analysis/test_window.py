# SPDX-License-Identifier: Apache-2.0
"""Warm-up is left out: rows before the window do not count, the state at its begin does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from analysis import Session, SessionError, Summary, open_session, summarize
from analysis.pool.usage import PoolUsage
from analysis.renderers.text import summary as text
from profilemate.commands.shared.values import seconds
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import assert_fails


def after(session: SessionBuilder, sec: float) -> Summary:
    return summarize(open_session(session.folder, after_sec=sec))


def usage_after(session: SessionBuilder, sec: float) -> PoolUsage:
    usage = after(session, sec).usage.combined
    assert usage is not None
    return usage


class TestUsage:
    @pytest.mark.usefixtures("small_chunks")
    def test_the_state_at_the_beginning_holds_until_the_next_row(
        self, session: SessionBuilder
    ) -> None:
        # From 3 s on: 50 % until 4 s, 20 % until 8 s, 0 % until the end at 10 s.
        session.usage((0, 90), (1, 50), (4, 20), (8, 0))
        usage = usage_after(session, 3)
        assert usage.observed_sec == 7
        assert usage.mean_pct == pytest.approx((50 + 4 * 20) / 7)
        assert (usage.p50_pct, usage.p95_pct) == (20, 50)
        assert usage.held_share == pytest.approx(5 / 7)
        assert usage.bands is not None
        assert usage.bands.from_40_to_60 == pytest.approx(1 / 7)
        # 90 % was before; 50 % was reached before, and still held when the window began.
        assert (usage.peak_pct, usage.peak.timestamp_sec) == (50, 3)
        assert (usage.end.held_blocks, usage.end.timestamp_sec) == (0, 8)

    def test_a_state_that_ends_where_the_window_begins_is_not_in_it(
        self, session: SessionBuilder
    ) -> None:
        session.usage((1, 50), (3, 20))
        usage = usage_after(session, 3)
        assert (usage.peak_pct, usage.mean_pct, usage.observed_sec) == (20, 20, 7)

    def test_a_peak_that_lasted_no_time_counts_in_the_window_only(
        self, session: SessionBuilder
    ) -> None:
        session.usage((1, 99), (1, 10), (5, 70), (5, 10))
        assert usage_after(session, 2).peak_pct == 70
        assert usage_after(session, 5).peak_pct == 70
        assert usage_after(session, 6).peak_pct == 10

    def test_without_a_change_in_the_window_the_last_state_holds(
        self, session: SessionBuilder
    ) -> None:
        session.usage((1, 10), (2, 30))
        usage = usage_after(session, 6)
        assert (usage.observed_sec, usage.mean_pct, usage.peak_pct) == (4, 30, 30)
        assert (usage.end.timestamp_sec, usage.end.held_blocks) == (6, 30)

    def test_an_engine_that_starts_in_the_window_counts_from_its_first_row(
        self, session: SessionBuilder
    ) -> None:
        session.usage((0, 100))
        session.usage((7, 40), engine=1)
        session.usage((6, 0))
        first, second = after(session, 5).usage.pools
        assert (first.observed_sec, first.mean_pct) == (5, 20)
        assert (second.observed_sec, second.mean_pct) == (3, 40)


def test_moves_evictions_lookups_and_steps_count_by_their_time(session: SessionBuilder) -> None:
    session.rows(
        "kv_cache_allocations.csv",
        {"timestamp_sec": 1, "event": "allocate", "num_blocks": 7},
        {"timestamp_sec": 2, "event": "allocate", "num_blocks": 3},
        {"timestamp_sec": 3, "event": "free", "num_blocks": 10},
    )
    session.evictions(
        {"timestamp_sec": 1.999999, "lifetime_sec": 1, "idle_sec": 1},
        {"timestamp_sec": 2.000000, "lifetime_sec": 2, "idle_sec": 1.5},
        {"timestamp_sec": 4, "lifetime_sec": 4, "idle_sec": 0.5},
    )
    session.lookups(
        {"timestamp_sec": 1, "request_id": "a", "query_tokens": 100, "hit_tokens": 0},
        {"timestamp_sec": 3, "request_id": "b", "query_tokens": 100, "hit_tokens": 96},
    )
    session.rows(
        "scheduler_steps.csv",
        {"timestamp_sec": 1, "preempted_reqs": 5},
        {"timestamp_sec": 2, "preempted_reqs": 1, "repeats": 3},
    )
    found = after(session, 2)
    assert (found.allocations.allocated.blocks, found.allocations.allocated.calls) == (3, 1)
    assert found.allocations.freed.blocks == 10
    assert found.evictions.total.blocks == 2
    # A block that goes in the window has lived as long as it has, warm-up included.
    assert found.lifetimes.lifetime.mean_sec == 3
    assert found.lifetimes.idle.max_sec == 1.5
    assert (found.prefix_cache.true.requests, found.prefix_cache.true.token_rate) == (1, 0.96)
    assert found.prefix_cache.vllm.token_rate == 0.96
    assert (found.preemptions.count, found.preemptions.steps) == (1, 3)
    assert (found.session.begin_sec, found.session.duration_sec) == (2, 10)


def test_requests_count_by_their_arrival(session: SessionBuilder) -> None:
    session.requests(
        {"timestamp": 1999.9, "input_length": 5, "output_length": 1, "finish_reason": "stop"},
        {"timestamp": 2000, "input_length": 70, "output_length": 2, "finish_reason": "length"},
    )
    requests = after(session, 2).requests
    assert (requests.ended, requests.input_tokens) == (1, 70)
    assert requests.by_reason == {"length": 1}


def test_a_window_without_a_row_has_no_figures(session: SessionBuilder) -> None:
    session.usage((1, 50))
    session.requests({"timestamp": 1000, "finish_reason": "stop"})
    session.evictions({})
    session.lookups({"query_tokens": 10, "hit_tokens": 5})
    session.rows("scheduler_steps.csv", {"preempted_reqs": 1})
    found = after(session, 2)
    assert found.requests.ended == 0
    assert found.evictions.total.blocks == 0
    assert found.lifetimes.lifetime.mean_sec is None
    assert found.prefix_cache.true.token_rate is None
    assert (found.preemptions.count, found.preemptions.steps) == (0, 0)
    assert found.admission.looked_up == 0
    assert found.usage.combined is not None
    assert found.usage.combined.mean_pct == 50


class TestAdmission:
    def test_one_that_had_been_admitted_before_and_was_preempted(
        self, session: SessionBuilder
    ) -> None:
        """Its lookup in the window led to nothing, but the request ran earlier."""
        session.lookups(
            {"timestamp_sec": 1, "request_id": "a", "query_tokens": 64, "hit_tokens": 0},
            {
                "timestamp_sec": 6,
                "request_id": "a",
                "query_tokens": 70,
                "hit_tokens": 0,
                "kind": "resumed",
                "admitted": 0,
            },
        )
        admission = after(session, 5).admission
        assert (admission.looked_up, admission.never_admitted) == (1, 0)

    def test_one_that_waited_before_and_is_admitted_in_the_window(
        self, session: SessionBuilder
    ) -> None:
        waited = {"request_id": "a", "query_tokens": 64, "hit_tokens": 32}
        session.lookups(
            {"timestamp_sec": 1, **waited, "admitted": 0, "lookups": 50},
            {"timestamp_sec": 6, **waited, "kind": "retry"},
        )
        found = after(session, 5)
        assert (found.admission.looked_up, found.admission.never_admitted) == (1, 0)
        assert (found.prefix_cache.true.requests, found.prefix_cache.true.token_rate) == (1, 0.5)
        assert found.prefix_cache.repeated.lookups == 0

    def test_one_that_came_and_went_before_is_none_of_them(self, session: SessionBuilder) -> None:
        session.usage((0, 10))
        huge = {"query_tokens": 100 * 16 + 1, "hit_tokens": 0, "admitted": 0}
        session.lookups(
            {"timestamp_sec": 1, "request_id": "gone", **huge, "lookups": 9},
            {"timestamp_sec": 4, "request_id": "waits", **huge, "lookups": 7},
            {"timestamp_sec": 6, "request_id": "waits", **huge, "kind": "retry", "lookups": 3},
        )
        admission = after(session, 5).admission
        assert (admission.looked_up, admission.never_admitted, admission.too_large) == (1, 1, 1)
        (waits,) = admission.largest
        assert (waits.request_id, waits.needed_blocks, waits.lookups) == ("waits", 101, 3)


class TestRequestsAfter:
    def begin(self, session: SessionBuilder, **options: float) -> float:
        return open_session(session.folder, **options).begin_sec  # type: ignore[arg-type]

    def test_the_window_begins_with_the_request_that_follows(self, session: SessionBuilder) -> None:
        # The file is in the order of their ends.
        for arrived in (3000.125, 500, 7000, 4000):
            session.requests({"timestamp": arrived, "input_length": 1})
        assert self.begin(session, after_requests=0) == 0
        assert self.begin(session, after_requests=1) == 3.000125
        assert self.begin(session, after_requests=3) == 7
        opened = open_session(session.folder, after_requests=1)
        assert summarize(opened).requests.ended == 3

    def test_the_last_half(self, session: SessionBuilder) -> None:
        session.requests(*({"timestamp": arrived} for arrived in (4000, 1000, 3000, 2000)))
        assert self.begin(session, last_half=True) == 3
        assert self.begin(session, last_half=True, after_requests=1) == 3
        assert self.begin(session, last_half=True, after_requests=3) == 4
        assert self.begin(session, last_half=True, after_sec=3.5) == 3.5

    def test_of_both_the_later_counts(self, session: SessionBuilder) -> None:
        session.requests(*({"timestamp": arrived} for arrived in (1000, 2000)))
        assert self.begin(session, after_requests=1, after_sec=1.5) == 2
        assert self.begin(session, after_requests=1, after_sec=2.5) == 2.5


class TestNothingLeft:
    def error(self, session: SessionBuilder, **options: float) -> str:
        with pytest.raises(SessionError) as caught:
            open_session(session.folder, **options)  # type: ignore[arg-type]
        assert str(session.folder) in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("sec", [10, 11.5])
    def test_the_session_has_ended(self, session: SessionBuilder, sec: float) -> None:
        session.usage((0, 10))
        said = self.error(session, after_sec=sec)
        assert f"it ends at 10 s, and what came before {sec:g} s is to be left out" in said

    def test_there_were_fewer_requests(self, session: SessionBuilder) -> None:
        assert "of its requests 0 have ended, and 1 are" in self.error(session, after_requests=1)
        session.requests({"timestamp": 1000}, {"timestamp": 2000})
        assert "of its requests 2 have ended" in self.error(session, after_requests=2)

    @pytest.mark.parametrize(
        "options", [{"after_sec": float("nan")}, {"after_sec": -1}, {"after_requests": -1}]
    )
    def test_no_warm_up_is_less_than_none(
        self, session: SessionBuilder, options: dict[str, Any]
    ) -> None:
        session.requests({"timestamp": 1000}, {"timestamp": 2000})
        with pytest.raises(SessionError, match=r"is (nan|-1); give a number"):
            open_session(session.folder, **options)


def test_the_text_says_what_is_left_out(session: SessionBuilder) -> None:
    session.usage((0, 10))
    rendered = text.render(after(session, 2.5))
    assert "\nWarm-up left out: the first 2.50 s of 10.00 s\n" in rendered
    assert "left out" not in text.render(after(session, 0))


def test_every_table_can_be_had_with_what_came_before(session: SessionBuilder) -> None:
    session.usage((1, 10), (2, 20), (3, 30))
    session.requests(*({"timestamp": arrived} for arrived in (1000, 2000)))
    opened: Session = open_session(session.folder, after_sec=2)
    for table, rows, all_rows in (("kv_cache_usage", 2, 3), ("requests", 1, 2)):
        assert opened.scan(table).collect().height == rows
        assert opened.scan(table, history=True).collect().height == all_rows
        time = ["engine"]
        assert sum(batch.height for batch in opened.batches(table, time)) == rows
        assert sum(batch.height for batch in opened.batches(table, time, history=True)) == all_rows


def test_lengths_of_time() -> None:
    assert [seconds(text) for text in ("30s", "2m", "1.5h", "45", "0.5", "250ms", "2 min")] == [
        30,
        120,
        5400,
        45,
        0.5,
        0.25,
        120,
    ]
    for wrong in ("", "s", "30x", "-1s", "1e3", "nan", "1h30m", "\uff11s"):
        with pytest.raises(typer.BadParameter, match="is not a time; write 30s, 2m"):
            seconds(wrong)


class TestCommand:
    def test_the_summary_leaves_it_out(self, session: SessionBuilder) -> None:
        session.evictions({"timestamp_sec": 1}, {"timestamp_sec": 5})
        session.requests(*({"timestamp": arrived} for arrived in (1000, 4500, 6000)))
        for options, begin in (
            (["--after", "2s"], 2),
            (["--requests-after", 1], 4.5),
            (["--last-half"], 4.5),
            (["--requests-after", 1, "--after", "0.08m"], 4.8),
        ):
            found = json.loads(invoke("summary", session.folder, "--json", *options).stdout)
            assert found["session"]["begin_sec"] == begin
            assert found["evictions"]["total"]["blocks"] == 1

    def test_what_makes_no_sense_is_said(self, session: SessionBuilder) -> None:
        result = invoke("summary", session.folder, "--after", "10s")
        assert_fails(result, "it ends at 10 s, and what came before 10 s is to be left out")
        result = invoke("summary", session.folder, "--after", "10 parsecs")
        assert (result.returncode, result.stdout) == (2, "")
        said = " ".join(result.stderr.split())
        assert "has no mark '10 parsecs', and that is no time; it has none; write 30s, 2m" in said
        for wrong in ("-1", "1.5", "\uff11", "\u0663", "1_000", "9" * 5_000):
            result = invoke("summary", session.folder, f"--requests-after={wrong}")
            assert (result.returncode, result.stdout) == (2, "")
            assert "is not a whole number; write 0, 1, 2 or more" in " ".join(result.stderr.split())
        # There is no period 0.
        result = invoke("summary", session.folder, "--period=first")
        assert "is not a whole number; write 1, 2, 3 or more" in " ".join(result.stderr.split())


def test_the_request_at_which_the_window_begins_is_in_all_of_it(session: SessionBuilder) -> None:
    """9 ms are 0.009 s, and 1e3 times 0.009 is a little more than 9."""
    session.metadata(prefix_lengths=[16])
    for name, milliseconds in (("warm-up", 1), ("first", 9), ("second", 20)):
        session.requests(
            {
                "request_id": name,
                "timestamp": milliseconds,
                "input_length": 20,
                "output_length": 1,
                "prefix_ids": [1],
                "finish_reason": "stop",
            }
        )
    found = summarize(open_session(session.folder, after_requests=1))
    assert (found.requests.ended, found.families.requests) == (2, 2)
