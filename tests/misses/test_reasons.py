# SPDX-License-Identifier: Apache-2.0
"""The reason of every missed block, against an oracle that watches inside the real scheduler."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import open_session, summarize
from analysis.prefix import miss_summary, misses, prompts, stretches
from analysis.prefix.miss_summary import MissReasons
from analysis.tables import facts
from analysis.tables.session import Session
from profilemate import collector
from tests.kv.recording import hooks_only, only_session
from tests.support.miss_oracle import Missed, MissOracle
from tests.support.scheduler import (
    RequestMaker,
    build_scheduler,
    drive,
    full_attention,
    sliding_window,
    tokens,
    trace_requests,
)

pytestmark = pytest.mark.usefixtures("hooks_on")


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """To go through all that vLLM has loaded takes a second, and may fall between the oracle's look
    at the clock and the hook's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def watched(sessions: Path) -> Iterator[MissOracle]:
    """A session whose tables are complete once the block ends."""
    with MissOracle().watching() as oracle, hooks_only(sessions):
        yield oracle
    collector.finalize(only_session(sessions))


def classified(session: Session) -> pl.DataFrame:
    """The analyzer's word on every missed block, with the names of the requests."""
    known = prompts.read(session)
    in_common = stretches.in_common(known)
    blocks = misses.missed_blocks(known, in_common)
    evicted = misses.LossTally(misses.content_ids(blocks))
    for batch in session.batches("kv_cache_evictions", misses.EVICTION_COLUMNS):
        evicted.add(batch)
    group = facts.read(session).full_attention_group
    reasons = misses.classify(blocks, known, in_common, evicted.result(), group=group)
    handed_out = miss_summary.HandedOutTally()
    for batch in session.batches("kv_cache_allocations", miss_summary.COLUMNS):
        handed_out.add(batch)
    short = miss_summary.with_shortfall(reasons, handed_out.result())
    every = known.asked.select(
        "lookup",
        "request_id",
        index=pl.int_ranges("first_missed", "full_blocks", dtype=pl.UInt32),
        last=pl.when("ends_prompt").then(pl.col("full_blocks") - 1),
    ).explode("index", empty_as_null=False)
    alone = pl.when(pl.col("index") == pl.col("last")).then(pl.lit("last token"))
    place = ["lookup", "index"]
    return (
        every.join(reasons, on=place, how="left")
        .join(short.select(*place, "more_blocks"), on=place, how="left")
        .with_columns(
            reason=pl.coalesce(pl.col("reason").cast(pl.String), alone, pl.lit("compulsory"))
        )
    )


def check(sessions: Path, oracle: MissOracle) -> Counter[str]:
    """Every block has the oracle's reason, and every reason the oracle's evidence."""
    session = open_session(only_session(sessions))
    blocks = classified(session).sort("lookup", "index")
    said = {
        (row["request_id"], row["index"]): row["reason"] for row in blocks.iter_rows(named=True)
    }
    seen = {
        (name, index): reason
        for name, missed in oracle.missed.items()
        for index, reason in missed.reasons.items()
    }
    wrong = {
        block: (said.get(block), seen.get(block))
        for block in said.keys() | seen.keys()
        if said.get(block) != seen.get(block)
    }
    assert not wrong, (len(wrong), len(seen), Counter(wrong.values()), list(wrong.items())[:5])
    for (name,), lost in blocks.filter(pl.col("reason") == "capacity").group_by("request_id"):
        check_evictions(lost, oracle.missed[str(name)])
    check_sums(summarize(session).misses)
    return Counter(seen.values())


def check_evictions(lost: pl.DataFrame, missed: Missed) -> None:
    """Who evicted a request's missed blocks, when, and how many blocks more would have done."""
    most = 0
    first_other = min((i for i in missed.reasons if i not in missed.evictions), default=1 << 30)
    for row in lost.sort("index").iter_rows(named=True):
        who, before_ns, handed_out = missed.evictions[row["index"]]
        assert row["evicting_request"] == who
        assert row["timestamp_sec"] - row["evicted_sec"] == pytest.approx(before_ns / 1e9, abs=0.3)
        most = max(most, handed_out)
        assert row["more_blocks"] == (most if row["index"] < first_other else None)


def check_sums(found: MissReasons) -> None:
    """Every token of the prompts is found, or missed for a reason, or in a last block."""
    missed = sum(part.tokens for part in found.by_reason.values())
    assert found.hit_tokens + missed + found.partial_tokens == found.query_tokens


@pytest.mark.parametrize("blocks", [1_000, 2_000, 16_000])
def test_trace(model: Path, tmp_path: Path, blocks: int) -> None:
    with watched(tmp_path) as oracle:
        drive(build_scheduler(model, blocks), trace_requests(RequestMaker()))
    reasons = check(tmp_path, oracle)
    assert reasons["compulsory"] == 52_142
    assert reasons["capacity"] > 1_000


def crowd(families: int, copies: int, length: int) -> Iterable[tuple[float, Any]]:
    """Prompts of a few families that share most of their tokens, all at once."""
    make = RequestMaker()
    for number in range(families * copies):
        family = number % families
        own = tokens(1_000 + number, 40)
        yield 0.0, make(f"request-{number}", tokens(family, length) + own, 5)


@pytest.mark.parametrize("blocks", [300, 2_000])
def test_chunks_of_prompts_that_are_alike(model: Path, tmp_path: Path, blocks: int) -> None:
    with watched(tmp_path) as oracle:
        scheduler = build_scheduler(
            model,
            blocks,
            max_num_batched_tokens=256,
            max_model_len=4_096,
            # Each prompt gets no more of a step than this, so that several are computed at once.
            long_prefill_token_threshold=64,
        )
        drive(scheduler, crowd(3, 12, 1_000))
    reasons = check(tmp_path, oracle)
    # The first step computes 64 tokens of each family, and then 64 more of the first one's second
    # prompt, which finds these 64: 62 full blocks are shared, 4 are found.
    assert reasons["not yet cached"] == 62 - 4


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemption(model: Path, tmp_path: Path, policy: str) -> None:
    make = RequestMaker()
    short = trace_requests(make, max_model_len=500)
    requests = [request for _, request in islice(short, 300)]
    for index, request in enumerate(requests):
        request.priority = index * 7 % 3
    with watched(tmp_path) as oracle:
        scheduler = build_scheduler(
            model, 120, max_model_len=1_024, scheduling_policy=policy, max_num_batched_tokens=1_024
        )
        drive(scheduler, [(0.0, request) for request in requests], step_ms=1)
    reasons = check(tmp_path, oracle)
    assert reasons["capacity"]


def rounds(sessions: int, count: int) -> Iterator[tuple[float, Any]]:
    """So many conversations in turn, each with a prompt of its own of 20 blocks and 3 tokens."""
    make = RequestMaker()
    for number in range(sessions * count):
        prompt = tokens(number % sessions, 20 * 16 + 3)
        yield 1_000.0 * number, make(f"request-{number}", prompt, 2)


def test_the_blocks_that_would_have_been_enough_are(model: Path, tmp_path: Path) -> None:
    """Ten conversations in turn need 10 x 21 blocks. With as many blocks more as the analyzer
    says nothing is evicted before it is asked for again; with a conversation's fewer, some is."""
    found = run_rounds(model, tmp_path / "small", 150)
    assert found.by_reason["capacity"].blocks > 100
    enough = 150 + (found.short.more_blocks_max or 0)
    assert "capacity" not in run_rounds(model, tmp_path / "enough", enough).by_reason
    assert "capacity" in run_rounds(model, tmp_path / "less", enough - 21).by_reason


def run_rounds(model: Path, folder: Path, usable_blocks: int) -> MissReasons:
    """Ten conversations in turn, each with a prompt of its own of 20 blocks and 3 tokens."""
    make = RequestMaker()
    requests = [
        (1e3 * number, make(f"request-{number}", tokens(number % 10, 20 * 16 + 3), 2))
        for number in range(30)
    ]
    with watched(folder) as oracle:
        drive(build_scheduler(model, usable_blocks + 1), requests)
    check(folder, oracle)
    return summarize(open_session(only_session(folder))).misses


def test_a_sliding_window_beside_full_attention(model: Path, tmp_path: Path) -> None:
    """A prompt that parts from an earlier one half-way needs the window at that place."""
    make = RequestMaker()
    requests: list[tuple[float, Any]] = []
    for number in range(0, 40, 2):
        shared, other = tokens(number, 20 * 16), tokens(number + 1, 20 * 16)
        noise = tokens(100 + number, 16 * 2 * number + 16)
        for name, prompt in (
            ("first", shared + other),
            ("noise", noise),
            ("second", shared + tokens(200 + number, 100)),
        ):
            requests.append((1e3 * len(requests), make(f"{name}-{number}", prompt, 2)))
    with watched(tmp_path) as oracle:
        specs = [full_attention(16), sliding_window(16, 40)]
        drive(build_scheduler(model, 200, specs=specs, max_model_len=4_096), requests)
    reasons = check(tmp_path, oracle)
    assert reasons["held back"]
