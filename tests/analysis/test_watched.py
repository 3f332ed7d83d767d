# SPDX-License-Identifier: Apache-2.0
"""Regret, blame, the preemption bill and rent, against an oracle inside the real scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from analysis import Session, open_session, summarize
from analysis.prefix import prompts, rent
from analysis.requests import preemption_bill, preemption_steps, preemptions, stints
from analysis.tables import facts
from profilemate import collector
from tests.kv.recording import Clock, hooks_only, only_session
from tests.kv.test_trace import crowded
from tests.support.cost_oracle import CostOracle
from tests.support.scheduler import RequestMaker, build_scheduler, drive, trace_requests

pytestmark = pytest.mark.usefixtures("hooks_on")


@contextmanager
def watched(sessions: Path, clock: Clock | None = None) -> Iterator[CostOracle]:
    """A session whose tables are complete once the block ends."""
    with CostOracle().watching() as oracle, hooks_only(sessions, clock):
        yield oracle
    collector.finalize(only_session(sessions))


@pytest.mark.parametrize("blocks", [300, 1_000, 4_000])
def test_every_regretted_eviction_and_its_evictor(model: Path, tmp_path: Path, blocks: int) -> None:
    with watched(tmp_path) as oracle:
        drive(build_scheduler(model, blocks), trace_requests(RequestMaker(), limit=1_000))
    session = open_session(only_session(tmp_path))
    summary = summarize(session)
    assert summary.evictions.total.blocks == sum(oracle.evicted.values())
    assert summary.evictions.regretted.blocks == len(oracle.regretted) > 100
    assert summary.evictions.regretted.requests == len(
        set().union(*(missed for _, missed in oracle.regretted.values()))
    )
    blame = summary.blame
    of = Counter(by for by, _ in oracle.regretted.values())
    assert blame.evictors == len(of)
    assert len(blame.worst) == 10
    for evictor in blame.worst:
        assert evictor.request_id is not None
        assert evictor.regretted_blocks == of[evictor.request_id]
        assert evictor.evicted_blocks == oracle.evicted[evictor.request_id]
        assert evictor.recomputed_tokens == 16 * oracle.recomputed_blocks[evictor.request_id]
    assert blame.recomputed_tokens == 16 * sum(oracle.recomputed_blocks.values())


@pytest.fixture(
    params=[
        pytest.param((120, {}), id="fcfs"),
        pytest.param((120, {"scheduling_policy": "priority"}), id="priority"),
        pytest.param((50, {"max_num_batched_tokens": 128}), id="chunked prefill"),
    ]
)
def crowd(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path
) -> tuple[Session, CostOracle]:
    """300 requests at once in a pool with room for a few, a millisecond a step."""
    blocks, arguments = request.param
    clock = Clock()
    with watched(tmp_path, clock) as oracle:
        scheduler = build_scheduler(model, blocks, max_model_len=1_024, **arguments)
        drive(scheduler, crowded(), step_ms=1, after_step=clock.tick)
    return open_session(only_session(tmp_path)), oracle


def test_every_preemption_and_what_it_cost(crowd: tuple[Session, CostOracle]) -> None:
    session, oracle = crowd
    known = prompts.read(session)
    named = stints.with_lookups(session, known)
    victims = preemptions.victims(named, known, 0.0)
    bill = preemption_bill.measure(
        session, facts.read(session), victims, preemption_steps.read(session)
    )
    # In the order of time, and of the preempted in one step by name.
    seen = sorted(oracle.preemptions, key=lambda one: (one.time, one.request))
    billed = bill.sort("preempted_sec", "request_id").rows(named=True)
    assert len(billed) == len(seen) > 3
    assert len(billed) == summarize(session).preemptions.count
    for row, one in zip(billed, seen, strict=True):
        assert (row["request_id"], row["found"]) == (one.request, one.found)
        # A prompt in the middle of a block is known to the block.
        assert 0 <= one.computed - row["computed"] < 16
        assert row["computed"] in (one.computed, one.computed // 16 * 16)
        assert row["made_room_for"] == one.needed_by
        assert row["by_itself"] == (one.needed_by == one.request)
        assert one.back is not None
        assert row["lost_sec"] == pytest.approx((one.back - one.time) / 1e9, abs=1e-6)


def test_whose_contents_were_taken_while_they_waited(crowd: tuple[Session, CostOracle]) -> None:
    session, oracle = crowd
    for preemption in summarize(session).preemptions.costliest:
        takers = [
            dict(one.takers) for one in oracle.preemptions if one.request == preemption.request_id
        ]
        assert dict(preemption.takers) in takers


def test_every_request_pays_for_what_is_in_its_block_table(
    crowd: tuple[Session, CostOracle],
) -> None:
    session, oracle = crowd
    held = rent.RentTally(stints.with_lookups(session, prompts.read(session)), 0.0, session.end_sec)
    for batch in session.batches("kv_cache_allocations", rent.COLUMNS):
        held.add(batch)
    paid = held.result()
    assert paid["running"].sum() == 0
    rents: dict[str, Any] = {
        row["request_id"]: (row["waiting"], row["decoding"]) for row in paid.iter_rows(named=True)
    }
    for name, (waiting, decoding) in oracle.rent.items():
        assert rents[name] == pytest.approx((waiting / 1e9, decoding / 1e9), abs=1e-6)
    assert sum(map(sum, rents.values())) == pytest.approx(
        sum(map(sum, oracle.rent.values())) / 1e9, abs=1e-3
    )
    found = summarize(session).rent
    assert found.exact
    assert found.pool_held == pytest.approx(oracle.held / 1e9, abs=1e-3)
    # Where several requests pay for a block, they pay more than the pool holds. A preempted request
    # holds nothing for a while, but is taken to hold what it shares.
    paid_in_all = found.waiting + found.decoding
    assert found.shared == pytest.approx(paid_in_all - found.pool_held, rel=0.03)
    assert found.shared > 0
