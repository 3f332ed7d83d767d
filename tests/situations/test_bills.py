# SPDX-License-Identifier: Apache-2.0
"""What work was done in vain, in the analyzer's words: the recompute tax (situation 19), requests
that preempt themselves (18) and aborted ones (24)."""

from __future__ import annotations

import pytest

from analysis.requests.preemptions import ByItself
from tests.situations.bench import Bench
from tests.situations.test_evicted import explained, run
from tests.support.scheduler import tokens


def test_the_recompute_tax_has_a_victim_and_a_taker(bench: Bench) -> None:
    """Ten usable blocks; a and b hold four each, five from step 2 on. In step 18 a needs a sixth:
    b is preempted with 80 tokens computed. a takes b's fifth block at once, its fourth in step
    34, and ends in step 49. b runs again in step 50 and finds 48 tokens, so 32 are computed twice,
    at once. 128 + 32 tokens, the 32 again and b's newest one come to what is asserted below."""
    engine = bench.engine(10)
    engine.run(bench.request("a", tokens(1, 64), 49), bench.request("b", tokens(2, 64), 20))
    summary, said = explained(engine)
    found = summary.preemptions
    # Prompts of 64; a decodes 48 tokens, b 19.
    assert found.scheduled_tokens == 2 * 64 + 48 + 19 + 32
    assert (found.count, found.resumed, found.recomputed_tokens) == (1, 1, 32)
    assert found.tax == pytest.approx(32 / 227)
    (one,) = found.costliest
    assert (one.request_id, one.made_room_for, one.by_itself) == ("b", "a", False)
    assert (one.computed_tokens, one.found_tokens) == (80, 48)
    assert (one.preempted_sec, one.resumed_sec) == (0.18, 0.5)
    assert one.lost_sec == pytest.approx(0.32)
    assert dict(one.takers) == {"a": 2}
    assert "Recompute tax 14.10 % 32 of 227 computed tokens had been computed before" in said
    assert (
        "b, preempted at 180.0 ms, lost 320.0 ms and computed 32 of 80 tokens again; room was "
        "made for a. Some of its blocks were evicted for a 2"
    ) in said


def test_a_request_that_preempts_itself_is_no_victim_of_another(bench: Bench) -> None:
    """glutton has computed one token in step 1 and 64 more in step 2, its four full blocks and a
    fifth, when the rest of its prompt does not fit beside holder's five of twelve blocks: it is the
    last to come, so it is the one to go, for its own needs. When holder has ended, it finds all
    four blocks again: nothing was lost but time, from second 0.032 on, when step 3 began, to
    second 0.384, when step 35 did. The one token in the fifth block is not known."""
    engine = bench.engine(12, max_num_batched_tokens=65, scheduler_reserve_full_isl=False)
    engine.add(bench.request("holder", tokens(1, 64), 34))
    run(engine, bench.request("glutton", tokens(2, 128), 1), 0.01)
    summary, said = explained(engine)
    found = summary.preemptions
    assert (found.count, found.resumed, found.by_itself) == (1, 1, 1)
    assert found.livelocks == (ByItself("glutton", 0, 1),)
    (one,) = found.costliest
    assert (one.made_room_for, one.by_itself) == ("glutton", True)
    assert (one.computed_tokens, one.found_tokens, one.recomputed_tokens) == (64, 64, 0)
    assert (one.preempted_sec, one.resumed_sec) == (0.032, 0.384)
    assert one.lost_sec == pytest.approx(0.352)
    assert "By themselves 1 the preempted request itself needed the blocks" in said


def test_aborted_requests_have_wasted_what_they_did_not_find(bench: Bench) -> None:
    """Prompts of 40 tokens that share 32. The first ends; the second finds 32 tokens, is aborted
    after ten steps with 49 tokens in its cache, and has wasted 17. The third is aborted before it
    was looked up. The work of the second held four blocks of the pool, one of them new in step 10
    (position 48): three for nine steps."""
    engine = bench.engine(20)
    shared = tokens(1, 32)
    engine.run(bench.request("ends", shared + tokens(2, 8), 1))
    engine.add(bench.request("gone", shared + tokens(3, 8), 50))
    engine.step(10)
    engine.add(bench.request("never", shared + tokens(4, 8), 5))
    engine.abort("gone", "never")
    summary, said = explained(engine)
    assert summary.requests.aborted == 2
    assert summary.requests.aborted_computed_tokens == 49
    assert summary.requests.aborted_wasted_tokens == 17
    assert "Aborted 2 17 tokens had been computed for them in vain" in said
    (gone,) = [renter for renter in summary.rent.top if renter.request_id == "gone"]
    assert gone.waiting + gone.decoding == pytest.approx(3 * 0.09)
