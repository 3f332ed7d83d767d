# SPDX-License-Identifier: Apache-2.0
"""Every measure has its name, its figure and its line in the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis import RuleError, open_session, summarize
from analysis.judgement import measures
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import MIB, mixed
from tests.analysis.moe import counted, with_experts
from tests.analysis.stories import swept
from tests.analysis.test_preemptions import victim_of_another
from tests.analysis.timed import with_gpu_time

DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "compare-and-check.md"


def known(session: SessionBuilder) -> None:
    """A session whose measures are easy to work out; in ``FIGURES`` they are."""
    # Of the 10 s: 4 at 20 %, 4 at 95 %, 2 at 0 %.
    session.usage((0, 20), (4, 95), (8, 0))
    session.rows(
        "kv_cache_allocations.csv",
        {"event": "allocate", "num_blocks": 30, "evicted_blocks": 3},
        {"event": "reuse", "num_blocks": 12},
        {"event": "reset", "num_blocks": ""},
    )
    session.evictions(
        {"lifetime_sec": 1, "idle_sec": 0.5, "reuse_count": 0},
        {"lifetime_sec": 2, "idle_sec": 0.5, "reuse_count": 3},
        {"lifetime_sec": 6, "idle_sec": 5.5, "reuse_count": 1},
    )
    huge = {"request_id": "huge", "query_tokens": 1601, "hit_tokens": 0, "admitted": 0}
    session.lookups(
        {"request_id": "a", "query_tokens": 100, "hit_tokens": 0},
        {"request_id": "b", "query_tokens": 100, "hit_tokens": 80},
        {"request_id": "c", "query_tokens": 50, "hit_tokens": 16},
        {"request_id": "d", "query_tokens": 150, "hit_tokens": 0},
        huge,
    )
    session.rows(
        "scheduler_steps.csv",
        {"preempted_reqs": 2, "scheduled_reqs": 2, "scheduled_tokens": 100},
        {"preempted_reqs": 1, "scheduled_reqs": 1, "scheduled_tokens": 50},
    )
    asked = {"input_length": 100, "output_length": 7, "computed_tokens": 106, "num_blocks": 7}
    stopped, aborted = {**asked, "finish_reason": "stop"}, {**asked, "finish_reason": "abort"}
    session.requests(
        {**stopped, "preemptions": 2, "timestamp": 1000}
        | {"queue_sec": 0.1, "first_token_sec": 2.0, "finish_sec": 4.0},
        {**stopped, "preemptions": 1, "timestamp": 2000}
        | {"queue_sec": 0.3, "first_token_sec": 3.5, "finish_sec": 7.0},
        {**aborted, "computed_tokens": 90, "timestamp": 3000, "num_blocks": 6, "finish_sec": 5.0},
    )


def placed(session: SessionBuilder) -> None:
    """Two layers of two expert-parallel ranks."""
    counted(session, (1, 0, 5, "4 3 2 1"), by_rank="7 3")
    counted(session, (1, 1, 5, "5 0 0 0"), by_rank="5 0")


FIGURES = {
    "hit_rate": 96 / 400,
    "request_hit_rate": 2 / 4,
    "vllm_hit_rate": 96 / 400,
    "hit_tokens": 96,
    # 0.1 and 0.3 s.
    "queue_p50": 0.2,
    "queue_p95": 0.1 + 0.95 * 0.2,
    "queue_p99": 0.1 + 0.99 * 0.2,
    # 1 and 1.5 s.
    "first_token_p50": 1.25,
    "first_token_p95": 1 + 0.95 * 0.5,
    "first_token_p99": 1 + 0.99 * 0.5,
    # 2, 3 and 5 s.
    "finish_p50": 3,
    "finish_p95": 3 + 0.9 * 2,
    "steps": 2,
    "step_requests_mean": 1.5,
    "step_tokens_mean": 75,
    "preemptions": 3,
    "preempted_requests": 2,
    "most_preemptions": 2,
    "usage_mean": (4 * 20 + 4 * 95) / 10,
    "usage_while_held": (4 * 20 + 4 * 95) / 8,
    "usage_p50": 20,
    "usage_p95": 95,
    "usage_peak": 95,
    "usage_under_40": 0.6,
    "usage_over_90": 0.4,
    # Of 7 + 7 + 6 blocks of 16 tokens.
    "empty_slots": 1 - (106 + 106 + 90) / (20 * 16),
    "evictions": 3,
    "evictions_reused": 2,
    "evictions_per_sec": 0.3,
    # All in second 1.
    "evictions_peak": 3,
    "lifetime_mean": 3,
    "lifetime_p50": 2,
    # Nine tenths of the way from the second of three to the third.
    "lifetime_p95": 2 + 0.9 * 4,
    "idle_p50": 0.5,
    "idle_p95": 0.5 + 0.9 * 5,
    "blocks_allocated": 30,
    "blocks_reused": 12,
    "resets": 1,
    "requests": 3,
    "input_tokens": 300,
    "output_tokens": 21,
    "aborted": 1,
    "aborted_tokens": 90,
    "never_admitted": 1,
    "too_large": 1,
    "duration": 10,
}


def waiting(session: SessionBuilder) -> None:
    """For 1 s two requests wait for places, then for 2 s one for blocks: 500 tokens need 32 of
    them, and 20 are left."""
    scheduler = {"max_num_seqs": 2, "max_num_batched_tokens": 400, "chunked_prefill": True}
    session.metadata(scheduler={**scheduler, "scheduler_reserve_full_isl": True})
    session.usage((0, 80))
    step = {"scheduled_reqs": 1, "scheduled_tokens": 10, "schedule_us": 100}
    session.rows(
        "scheduler_steps.csv",
        {"timestamp_sec": 1, "step": 1, "running_reqs": 2, "waiting_reqs": 2, **step},
        {"timestamp_sec": 2, "step": 2, "running_reqs": 1, "waiting_reqs": 1, **step},
        {"timestamp_sec": 4, "step": 3, "running_reqs": 1, "waiting_reqs": 0, **step},
    )
    refused = {"request_id": "head", "query_tokens": 500, "hit_tokens": 0, "admitted": 0}
    session.lookups({"timestamp_sec": 1.99995, **refused})


def leaking(session: SessionBuilder) -> None:
    """Two blocks of a request that ended are never freed, and nothing runs after it."""
    session.usage((1, 6))
    session.usage((3, 2), running_reqs=0)
    session.rows(
        "kv_cache_allocations.csv",
        {"timestamp_sec": 1, "event": "allocate", "num_blocks": 6, "request_id": "r"},
        {"timestamp_sec": 3, "event": "free", "num_blocks": 4, "request_id": "r"},
    )
    session.requests({"request_id": "r", "timestamp": 1000, "finish_sec": 3})


def swept_on_purpose(reason: str) -> Callable[[SessionBuilder], None]:
    """What a request evicted in ``swept`` is lost for this reason."""

    def story(session: SessionBuilder) -> None:
        swept(session)
        path = session.folder / "kv_cache_evictions.csv"
        path.write_text(path.read_text().replace("reallocated", reason).replace(",S,", ",,"))

    return story


def on_a_gpu(session: SessionBuilder) -> None:
    """In ``mixed`` 18 of 20 executions and 88 of 128 tokens are in graphs, 16 of 104 padding."""
    mixed(session)
    sample = {"free_bytes": 3 * MIB}
    session.rows("gpu_memory.csv", *({**sample, "used_bytes": used} for used in (70, 75, 60)))


def speculating(session: SessionBuilder) -> None:
    """Two requests with drafts, and one of a release that did not record them."""
    drafts = ({"draft_tokens": 4, "accepted_tokens": 3}, {"draft_tokens": 6, "accepted_tokens": 1})
    session.requests(*drafts, {})


STORIES = {
    known: FIGURES,
    waiting: {"waiting": 4, "waiting_most": 2, "waiting_for_blocks": 2},
    leaking: {"leaked_blocks": 2},
    # Of 300 tokens 112 are found, and 144 would be with nothing evicted.
    swept: {
        "hit_rate_ceiling": 144 / 300,
        "recomputed_tokens": 32,
        "recomputed_share": 32 / (300 - 112),
        "evictions_regretted": 2,
    },
    swept_on_purpose("reset"): {"reset_tokens": 32, "recomputed_tokens": 0},
    swept_on_purpose("explicit"): {"explicit_tokens": 32, "evictions_regretted": 0},
    victim_of_another: {
        "preemption_tokens": 47,
        "preemption_tax": 47 / 235,
        "preemption_lost": 3.5,
    },
    # 3 and 1 of 4 and 6 drafts.
    speculating: {"draft_acceptance": 4 / 10},
    on_a_gpu: {
        "graph_coverage": 18 / 20,
        "graphed_tokens": 88 / 128,
        "graph_padding": 16 / 104,
        "graphs_unused": 4,
        "graph_memory": 106 * MIB,
        "gpu_memory_peak": 75,
    },
    # Of one layer, 8, 6, 4 and 2 tokens; of the other, 5, 10, 5 and none.
    with_experts: {
        "expert_imbalance": (8 / 5 + 10 / 5) / 2,
        "expert_gini": (0.25 + 0.375) / 2,
        "experts_unused": 1 / 8,
    },
    # Of 10 and 5 tokens the busier rank has 7, and all.
    placed: {"expert_balancedness": 15 / 2 / 12},
    with_gpu_time: {
        "gpu_decode_step_p50": 0.03,
        "gpu_mixed_step_p50": 0.3,
        "gpu_encoder_share": 0.1 / 0.96,
    },
}


@pytest.mark.parametrize("story", STORIES)
def test_every_figure(session: SessionBuilder, story: Callable[[SessionBuilder], None]) -> None:
    story(session)
    found = measures.of(summarize(open_session(session.folder)))
    assert list(found) == [measure.name for measure in measures.CATALOGUE]
    assert {name: found[name] for name in STORIES[story]} == pytest.approx(STORIES[story])


def test_no_figure_is_left_out() -> None:
    worked_out = {name for figures in STORIES.values() for name in figures}
    assert worked_out == {measure.name for measure in measures.CATALOGUE}


def test_rates_over_time_are_those_of_the_window(session: SessionBuilder) -> None:
    session.usage((0, 10))
    session.evictions({"timestamp_sec": 1}, {"timestamp_sec": 7}, {"timestamp_sec": 9})
    found = measures.of(summarize(open_session(session.folder, after_sec=6)))
    assert (found["evictions"], found["duration"], found["evictions_per_sec"]) == (2, 4, 0.5)


def test_an_empty_session_has_counts_but_no_rates(session: SessionBuilder) -> None:
    session.metadata(ended_at=None)
    found = measures.of(summarize(open_session(session.folder)))
    none = ["hit_rate", "usage_mean", "usage_over_90", "evictions_per_sec", "idle_p95"]
    assert [found[name] for name in none] == [None] * 5
    assert (found["evictions"], found["preemptions"], found["requests"]) == (0, 0, 0)


def test_what_is_no_number_is_no_value(session: SessionBuilder) -> None:
    session.evictions({"lifetime_sec": "", "idle_sec": ""})
    found = measures.of(summarize(open_session(session.folder)))
    assert (found["lifetime_mean"], found["idle_p50"], found["evictions"]) == (None, None, 1)


def test_the_nearest_names_are_said() -> None:
    assert measures.by_name("hit_rate").better == "higher"
    for wrong, near in {
        "hitrate": "hit_rate",
        "preemption": "preemptions",
        "usage_p59": "usage_p95",
        "p95": "usage_p95",
    }.items():
        with pytest.raises(RuleError) as caught:
            measures.by_name(wrong)
        assert near in str(caught.value)
        assert "profilemate check --list" in str(caught.value)
    with pytest.raises(RuleError, match=r"there is no measure 'xyzzy'; 'profilemate"):
        measures.by_name("xyzzy")


def test_the_documentation_has_the_same_measures() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", DOCUMENTATION.read_text(), re.MULTILINE
    )
    assert rows == [
        (measure.name, measure.unit, measure.says, measure.better or "")
        for measure in measures.CATALOGUE
    ]
