# SPDX-License-Identifier: Apache-2.0
"""The bill of hand-written sessions; ``test_watched`` has the real scheduler's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from analysis import Summary, measures, open_session, summarize
from analysis.judgement.story import sentences
from analysis.renderers.text import screen
from analysis.renderers.text import summary as text
from analysis.requests.preemptions import ByItself
from analysis.wording.sections import PREEMPTIONS
from tests.analysis.builder import SessionBuilder


def summary_of(session: SessionBuilder, after_sec: float = 0.0) -> Summary:
    return summarize(open_session(session.folder, after_sec=after_sec))


def moves(session: SessionBuilder, *rows: tuple[Any, ...]) -> None:
    """Rows of (time, step, event, blocks, request)."""
    columns = ("timestamp_sec", "step", "event", "num_blocks", "request_id")
    session.rows(
        "kv_cache_allocations.csv", *(dict(zip(columns, row, strict=True)) for row in rows)
    )


def lookup(time: float, name: str, tokens: int, hit: int, kind: str = "first") -> dict[str, Any]:
    return {
        "timestamp_sec": time,
        "request_id": name,
        "query_tokens": tokens,
        "hit_tokens": hit,
        "kind": kind,
    }


def victim_of_another(session: SessionBuilder) -> None:
    """victim has a prompt of 64 tokens (four blocks) and is preempted in step 3 with 16 tokens of
    output: 79 are computed, of which four blocks are full. taker gets two of its blocks and evicts
    two contents. Back in step 9 it finds 32 tokens, and has its four blocks again in step 10."""
    session.lookups(
        lookup(1, "victim", 64, 0),
        lookup(2, "taker", 16, 0),
        lookup(6, "victim", 80, 32, kind="resumed"),
    )
    session.requests(
        {"request_id": "victim", "timestamp": 1000, "input_length": 64, "output_length": 20}
        | {"hash_ids": [1, 2, 3, 4], "output_hash_ids": [5], "computed_tokens": 83}
        | {"block_size": 16, "first_token_sec": 1.5, "finish_sec": 8, "preemptions": 1},
        {"request_id": "taker", "timestamp": 2000, "input_length": 16, "output_length": 40}
        | {"hash_ids": [11], "output_hash_ids": [12, 13], "computed_tokens": 55}
        | {"block_size": 16, "first_token_sec": 2.5, "finish_sec": 7, "preemptions": 0},
    )
    moves(
        session,
        (1.001, 1, "allocate", 4, "victim"),
        (1.001, 1, "cache", 4, "victim"),
        (2.001, 2, "allocate", 1, "taker"),
        (2.5, 2, "allocate", 1, "victim"),
        (3, 3, "free", 5, "victim"),
        (3.001, 3, "allocate", 1, "taker"),
        (5, 6, "allocate", 1, "taker"),
        (6.001, 9, "reuse", 2, "victim"),
        (6.002, 9, "allocate", 3, "victim"),
        (6.003, 9, "cache", 1, "victim"),
        (6.5, 10, "cache", 1, "victim"),
        (7, 11, "free", 3, "taker"),
        (8, 12, "free", 5, "victim"),
    )
    session.evictions(
        {"timestamp_sec": 2.9, "owner_request": "victim", "evicting_request": "early"},
        {"timestamp_sec": 3.001, "owner_request": "victim", "evicting_request": "taker"},
        {"timestamp_sec": 4, "owner_request": "somebody", "evicting_request": "taker"},
        {"timestamp_sec": 5, "owner_request": "victim", "evicting_request": "taker"},
        {"timestamp_sec": 5.5, "owner_request": "victim", "evicting_request": "other"},
        {"timestamp_sec": 7.5, "owner_request": "victim", "evicting_request": "late"},
    )
    session.rows(
        "scheduler_steps.csv",
        {"timestamp_sec": 3.002, "step": 3, "preempted_reqs": 1, "scheduled_tokens": 100},
        {"timestamp_sec": 6.004, "step": 9, "scheduled_tokens": 135},
    )


def test_the_bill_of_one_preemption(session: SessionBuilder) -> None:
    """Computed: 80 - 1. Found: 32. 47 of 235 tokens were computed twice; from second 3 to second
    6.5 it was behind."""
    victim_of_another(session)
    found = summary_of(session).preemptions
    assert (found.count, found.resumed) == (1, 1)
    assert (found.recomputed_tokens, found.scheduled_tokens) == (47, 235)
    assert found.tax == pytest.approx(47 / 235)
    (one,) = found.costliest
    assert (one.request_id, one.preempted_sec, one.resumed_sec) == ("victim", 3, 6)
    assert (one.computed_tokens, one.found_tokens, one.recomputed_tokens) == (79, 32, 47)
    assert one.lost_sec == found.lost_sec == 3.5
    assert (one.made_room_for, one.by_itself) == ("taker", False)
    # While it waited; what was evicted before and after is not its preemption's doing.
    assert dict(one.takers) == {"taker": 2, "other": 1}
    rendered = " ".join(text.render(summary_of(session)).split())
    assert "Recompute tax 20.00 % 47 of 235 computed tokens had been computed before" in rendered
    assert (
        "victim, preempted at 3.00 s, lost 3.50 s and computed 47 of 79 tokens again; room was "
        "made for taker. Some of its blocks were evicted for taker 2, other 1"
    ) in rendered


def test_a_preemption_in_the_warm_up_is_left_out(session: SessionBuilder) -> None:
    victim_of_another(session)
    assert summary_of(session, after_sec=3.5).preemptions.resumed == 0


def test_blocks_that_come_back_later_do_not_show_for_whom(session: SessionBuilder) -> None:
    """Parked blocks are freed in a step that preempted nobody."""
    victim_of_another(session)
    path = session.folder / "scheduler_steps.csv"
    path.write_text(path.read_text().replace("3.002,3,", "2.9,2,"))
    (one,) = summary_of(session).preemptions.costliest
    assert (one.made_room_for, one.by_itself, one.recomputed_tokens) == (None, False, 47)
    assert (one.preempted_sec, one.lost_sec) == (pytest.approx(2.9), pytest.approx(3.6))
    parked = summary_of(session).preemptions.parked
    assert (parked.preemptions, parked.blocks, parked.most_steps) == (1, 5, 1)
    assert parked.longest_sec == pytest.approx(0.1)
    said = " ".join(text.render(summary_of(session)).split())
    assert "Parked 5 blocks of 1 preemption came free only later, up to 1 step or 100.0 ms" in said


def test_a_reset_of_the_cache_makes_room_for_nobody(session: SessionBuilder) -> None:
    victim_of_another(session)
    path = session.folder / "kv_cache_allocations.csv"
    path.write_text(path.read_text().replace("3.001,allocate,1,taker", "3.001,reset,1,"))
    (one,) = summary_of(session).preemptions.costliest
    assert (one.made_room_for, one.by_itself) == (None, False)


def test_a_request_that_preempts_itself_is_named(session: SessionBuilder) -> None:
    """Admitted with 32 of its 64 tokens in steps 1, 3 and 5, preempted in 2, 4 and 6 with nothing
    after it, at last run in steps 7 and 8. Each time it finds what it had: no token is lost."""
    session.lookups(
        *(
            lookup(step, "glutton", 64, hit, kind=kind)
            for step, hit, kind in (
                (1, 0, "first"),
                (3, 32, "resumed"),
                (5, 32, "resumed"),
                (7, 16, "resumed"),
            )
        )
    )
    session.requests(
        {"request_id": "glutton", "timestamp": 500, "input_length": 64, "output_length": 1}
        | {"hash_ids": [1, 2, 3, 4], "output_hash_ids": [], "computed_tokens": 64}
        | {"block_size": 16, "first_token_sec": 8.5, "finish_sec": 9, "preemptions": 3}
    )
    moves(
        session,
        (1, 1, "allocate", 2, "glutton"),
        (1, 1, "cache", 2, "glutton"),
        (2, 2, "free", 2, "glutton"),
        (3, 3, "reuse", 2, "glutton"),
        (4, 4, "free", 2, "glutton"),
        (5, 5, "reuse", 2, "glutton"),
        (6, 6, "free", 2, "glutton"),
        (7, 7, "allocate", 3, "glutton"),
        (7, 7, "cache", 1, "glutton"),
        (8, 8, "cache", 2, "glutton"),
        (9, 8, "free", 4, "glutton"),
    )
    session.rows(
        "scheduler_steps.csv",
        *({"timestamp_sec": step, "step": step, "preempted_reqs": 1} for step in (2, 4, 6)),
    )
    found = summary_of(session).preemptions
    assert (found.resumed, found.by_itself) == (3, 3)
    assert found.livelocks == (ByItself("glutton", 0, 3),)
    # After the last one it found one block of the two, and had both again at once.
    assert [one.recomputed_tokens for one in found.costliest] == [16, 0, 0]
    assert {one.computed_tokens for one in found.costliest} == {32}
    assert found.lost_sec == 3
    rendered = " ".join(text.render(summary_of(session)).split())
    assert "glutton preempted itself 3 times" in rendered
    # One that does so while alone is named once, with those that can never run.
    (session.folder / "scheduler_steps.csv").unlink()
    alone = {"preempted_reqs": 1, "running_reqs": 0, "scheduled_tokens": 0}
    session.rows(
        "scheduler_steps.csv",
        *({"timestamp_sec": step, "step": step, **alone} for step in (2, 4, 6)),
    )
    rendered = " ".join(text.render(summary_of(session)).split())
    assert "Preempts itself 3 times glutton has no room" in rendered
    assert "glutton preempted itself" not in rendered


def test_a_request_that_is_preempted_before_it_is_back_has_lost_until_then(
    session: SessionBuilder,
) -> None:
    """80 tokens computed, preempted in second 3 and, after two blocks of five, in second 5."""
    session.lookups(
        lookup(1, "victim", 81, 0),
        lookup(4, "victim", 81, 0, kind="resumed"),
        lookup(6, "victim", 81, 32, kind="resumed"),
    )
    session.requests(
        {"request_id": "victim", "timestamp": 500, "input_length": 81, "output_length": 1}
        | {"hash_ids": [1, 2, 3, 4, 5, 99], "output_hash_ids": [], "computed_tokens": 81}
        | {"block_size": 16, "first_token_sec": 7.5, "finish_sec": 9, "preemptions": 2}
    )
    moves(
        session,
        (1, 1, "cache", 5, "victim"),
        (3, 3, "free", 5, "victim"),
        (4, 4, "cache", 2, "victim"),
        # Scheduled in the step that preempts it, and so not computed.
        (5, 5, "cache", 1, "victim"),
        (5, 5, "free", 5, "victim"),
        (6, 6, "cache", 3, "victim"),
        (9, 9, "free", 5, "victim"),
    )
    found = summary_of(session).preemptions
    assert [
        (one.computed_tokens, one.recomputed_tokens, one.lost_sec) for one in found.costliest
    ] == [(80, 80, 2), (32, 0, 1)]


def test_a_session_without_preemptions_has_no_bill(session: SessionBuilder) -> None:
    found = summary_of(session).preemptions
    assert (found.count, found.resumed, found.tax, found.costliest) == (0, 0, None, ())
    assert "preemption bill" not in text.render(summary_of(session))


def test_without_requests_that_ended_the_cost_is_not_known(session: SessionBuilder) -> None:
    victim_of_another(session)
    (session.folder / "requests.jsonl").write_text("")
    found = summary_of(session)
    bill = found.preemptions
    assert (bill.count, bill.resumed, bill.scheduled_tokens) == (1, 0, 235)
    assert (bill.recomputed_tokens, bill.tax, bill.lost_sec) == (None, None, None)
    assert measures.by_name("preemption_tokens").of(found) is None
    (said,) = (one for one in found.findings if one.section == PREEMPTIONS)
    assert said.tokens is None
    for rendered in (text.render(found), screen.render(found), " ".join(sentences(found))):
        shown = " ".join(rendered.split())
        assert not re.search(r"\b0 tokens (\(|were computed again)", shown)
        assert "cost is not known" in shown
