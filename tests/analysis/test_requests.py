# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from analysis import Summary, open_session, summarize
from analysis.requests.admission import PreemptsItself, TooLarge
from tests.analysis.builder import METADATA, SessionBuilder


def summary_of(session: SessionBuilder) -> Summary:
    return summarize(open_session(session.folder))


def ended(reason: str | None, **fields: int) -> dict[str, object]:
    row = {"input_length": 100, "output_length": 10, "preemptions": 0, "computed_tokens": 109}
    return {"request_id": "r", "finish_reason": reason, **row, **fields}


def test_ended_requests_are_counted_by_reason(session: SessionBuilder) -> None:
    session.requests(ended("stop"), ended("length"), ended("length"), ended("abort"), ended(None))
    requests = summary_of(session).requests
    assert requests.ended == 5
    assert requests.by_reason == {"length": 2, "abort": 1, "stop": 1, "unknown": 1}
    assert (requests.input_tokens, requests.output_tokens) == (500, 50)


def test_aborted_requests_and_the_work_wasted_on_them(session: SessionBuilder) -> None:
    session.requests(
        ended("stop"),
        ended("abort", computed_tokens=70),
        ended("abort", computed_tokens=0, output_length=0),
    )
    requests = summary_of(session).requests
    assert (requests.aborted, requests.aborted_computed_tokens) == (2, 70)


def test_preemptions_of_all_steps_and_of_the_requests_that_ended(session: SessionBuilder) -> None:
    session.rows(
        "scheduler_steps.csv",
        {"preempted_reqs": 0},
        {"preempted_reqs": 2},
        {"preempted_reqs": 0, "repeats": 40},
        {"preempted_reqs": 3, "engine": 1},
    )
    session.requests(ended("stop", preemptions=3), ended("stop", preemptions=1), ended("stop"))
    summary = summary_of(session)
    assert (summary.preemptions.count, summary.preemptions.steps) == (5, 43)
    assert (summary.requests.preempted, summary.requests.ended) == (2, 3)
    assert summary.requests.most_preemptions == 3


def test_a_prompt_that_needs_more_blocks_than_there_are_can_never_run(
    session: SessionBuilder,
) -> None:
    # Situation 17: 64 blocks, of which the null block is one; 1,009 tokens need 64 of 16 each.
    session.metadata(cache={**METADATA["cache"], "blocks": 64})
    session.lookups(
        {"request_id": "fits", "query_tokens": 1008, "hit_tokens": 0},
        {"request_id": "never", "query_tokens": 1009, "hit_tokens": 0, "admitted": 0},
        {
            "request_id": "never",
            "query_tokens": 1009,
            "hit_tokens": 0,
            "admitted": 0,
            "kind": "retry",
            "lookups": 20_000,
        },
        {"request_id": "waits", "query_tokens": 10, "hit_tokens": 0, "admitted": 0},
    )
    admission = summary_of(session).admission
    assert (admission.looked_up, admission.never_admitted) == (3, 2)
    assert admission.too_large == 1
    assert admission.largest == (TooLarge("never", 0, 1009, 64, 63, 20_001),)


def test_what_was_seen_of_a_pool_counts_before_the_configuration(session: SessionBuilder) -> None:
    session.usage((1, 10))
    session.metadata(cache={**METADATA["cache"], "blocks": 1000})
    session.lookups({"request_id": "a", "query_tokens": 1601, "hit_tokens": 0, "admitted": 0})
    assert summary_of(session).admission.largest[0].usable_blocks == 100


def test_with_other_groups_it_is_not_known(session: SessionBuilder) -> None:
    session.lookups({"request_id": "a", "query_tokens": 9999, "hit_tokens": 0, "admitted": 0})
    for groups in (
        [{"kind": "SlidingWindowSpec", "block_size": 16}],
        [{"kind": "FullAttentionSpec", "block_size": 16}, {"kind": "MambaSpec", "block_size": 16}],
        None,
    ):
        session.metadata(groups=groups)
        admission = summary_of(session).admission
        assert admission.too_large is None
        assert admission.largest == ()
        assert admission.never_admitted == 1


def test_each_engine_has_its_own_pool(session: SessionBuilder) -> None:
    session.usage((1, 10))
    session.usage((1, 10), engine=1, total_blocks=200, free_blocks=180)
    session.lookups(
        *(
            {"request_id": "a", "query_tokens": 150 * 16, "hit_tokens": 0, "engine": engine}
            for engine in (0, 1)
        )
    )
    assert [request.engine for request in summary_of(session).admission.largest] == [0]


def test_only_the_largest_are_named(session: SessionBuilder) -> None:
    session.lookups(
        *(
            {"request_id": f"{number:02}", "query_tokens": 2000 + number, "hit_tokens": 0}
            for number in range(15)
        )
    )
    admission = summary_of(session).admission
    assert admission.too_large == 15
    assert [request.request_id for request in admission.largest] == [
        f"{number:02}" for number in range(14, 4, -1)
    ]


def test_a_request_that_preempts_itself_while_alone(session: SessionBuilder) -> None:
    """huge does so in steps 2, 4 and 6; once does it once. In step 8 others run, in step 9 two are
    preempted: these make room for somebody."""

    def preempting(step: int, preempted: int = 1, running: int = 0) -> dict[str, int]:
        return {
            "step": step,
            "preempted_reqs": preempted,
            "running_reqs": running,
            "scheduled_tokens": running,
        }

    session.rows(
        "scheduler_steps.csv",
        *map(preempting, (2, 4, 6, 7)),
        preempting(8, running=3),
        preempting(9, preempted=2),
        *({**preempting(step), "engine": 1} for step in (2, 4)),
    )
    freed = [(2, "huge"), (4, "huge"), (6, "huge"), (7, "once"), (8, "other"), (9, "other")]
    session.rows(
        "kv_cache_allocations.csv",
        *(
            {"event": "free", "num_blocks": 3, "request_id": name, "step": step}
            for step, name in freed
        ),
        {"event": "free", "num_blocks": 3, "request_id": "huge", "step": 4},
    )
    admission = summary_of(session).admission
    assert admission.self_preempted == 1
    assert admission.circling == (PreemptsItself("huge", 0, 3),)
