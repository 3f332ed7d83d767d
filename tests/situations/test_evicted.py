# SPDX-License-Identifier: Apache-2.0
"""What the analyzer says of evictions: one group that sweeps the pool (situation 4), sessions in
turn (5), output that nobody asks for (10) and one-off prompts (14)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import analysis
from analysis.pool.evictions import Evicted
from analysis.renderers.text import summary as text
from tests.situations.bench import Bench, Engine
from tests.support.scheduler import full_attention, sliding_window, tokens


def run(engine: Engine, request: Any, seconds: float = 1.0) -> None:
    """The request comes alone and runs to its end: ``seconds`` before each step, and a
    millisecond until its result."""
    engine.add(request)
    while engine.scheduler.has_unfinished_requests():
        output = engine.schedule(seconds)
        engine.wait(0.001)
        engine.update(output)


def explained(engine: Engine) -> tuple[analysis.Summary, str]:
    """The summary, and its text as one line."""
    summary = analysis.summarize(analysis.open_session(engine.end().folder))
    return summary, " ".join(text.render(summary).split())


def sessions_in_turn(bench: Bench, count: int) -> Engine:
    """Three rounds of so many sessions of 384 tokens (24 blocks), on a pool of 96 blocks."""
    engine = bench.engine(96)
    for turn in range(3):
        for number in range(count):
            run(engine, bench.request(f"{number} turn {turn}", tokens(number, 384), 1))
    return engine


def test_four_sessions_in_turn_all_hit(bench: Bench) -> None:
    """They need 96 blocks. Every turn but the first finds 23 blocks: the 24th ends the prompt."""
    summary, said = explained(sessions_in_turn(bench, 4))
    assert (summary.prefix_cache.true.requests_hit, summary.prefix_cache.true.requests) == (8, 12)
    assert summary.prefix_cache.true.hit_tokens == 8 * 368
    (found,) = summary.sharing.found_rounds
    assert found.window_sec == pytest.approx(4 * 1.001)
    assert (found.peak_blocks, found.pool_blocks) == (96, 96)
    assert summary.sharing.missed_rounds == ()
    assert "What was found came back after 4.00 s (median). In such a time up to 96 blocks" in said


def test_a_fifth_session_makes_all_of_them_miss(bench: Bench) -> None:
    """They need 120 blocks: each evicts the one that is next. 15 requests take 360 blocks, 96 of
    them free; of the 264 evictions, the 23 blocks a turn that could be found are regretted, in
    two rounds of five."""
    summary, said = explained(sessions_in_turn(bench, 5))
    assert summary.prefix_cache.true.requests_hit == 0
    (missed,) = summary.sharing.missed_rounds
    assert missed.window_sec == pytest.approx(5 * 1.001)
    assert (missed.peak_blocks, missed.pool_blocks) == (120, 96)
    assert summary.sharing.found_rounds == ()
    evictions = summary.evictions
    assert (evictions.total.blocks, evictions.regretted.blocks) == (264, 230)
    assert evictions.regretted.recomputed_tokens == 230 * 16
    # Evicted four turns after they were used, asked for one turn later.
    assert summary.ages.at_eviction.p50_sec == pytest.approx(4 * 1.001)
    assert (summary.ages.reuses, summary.ages.later_share) == (230, 1.0)
    assert evictions.regretted.after.p50_sec == pytest.approx(1.001)
    assert "In such a time up to 120 blocks are used, and the pool has 96." in said
    assert "Back too late 100.00 % of 230 blocks asked for again" in said


def test_output_that_nobody_asks_for_is_dead_on_arrival(bench: Bench) -> None:
    """Ten questions after a prompt that all share: 32 + 16 tokens, and 49 of output, of which 48
    are computed. The first takes six blocks, each other one four more (a prompt's and three of
    output), 42 in all, on a pool of 20: 22 are evicted, which are five times those four, and two
    more of output."""
    engine = bench.engine(20)
    shared = tokens(1, 32)
    for number in range(10):
        run(engine, bench.request(f"r{number}", shared + tokens(2 + number, 16), 49), 0.01)
    summary, said = explained(engine)
    assert summary.prefix_cache.true.hit_tokens == 9 * 32
    # Blocks, never reused, copies left, and the tokens of the first two.
    assert summary.evictions.by_origin == {
        "output": Evicted(17, 17, 0, 272, 272),
        "prompt": Evicted(5, 5, 0, 80, 80),
    }
    assert (summary.evictions.regretted.blocks, summary.evictions.harmless) == (0, 22)
    dead = "Dead on arrival 22 blocks never reused: 17 of output (272 tokens), 5 of prompt"
    assert dead in said


def test_a_one_off_prompt_sweeps_the_system_prompt_out(bench: Bench) -> None:
    """Two users share a system prompt of 64 tokens: six blocks with their questions. A one-off
    prompt of 320 tokens takes all 20 blocks; the third user computes the system prompt again, the
    fourth finds it."""
    engine = bench.engine(20)
    system = tokens(1, 64)
    for number in (0, 1):
        run(engine, bench.request(f"user{number}", system + tokens(10 + number, 16), 1))
    run(engine, bench.request("scan", tokens(2, 320), 1))
    for number in (2, 3):
        run(engine, bench.request(f"user{number}", system + tokens(10 + number, 16), 1))
    summary, said = explained(engine)
    blame = summary.blame
    (worst,) = blame.worst
    assert (worst.request_id, worst.one_off, worst.input_tokens) == ("scan", True, 320)
    assert (worst.evicted_blocks, worst.regretted_blocks, worst.recomputed_tokens) == (6, 4, 64)
    assert worst.requests == 1
    assert worst.after_p50_sec == pytest.approx(1.001)
    swept = blame.sweepers
    assert (swept.requests, swept.evicted_tokens, swept.share) == (1, 96, 1.0)
    # user0 and user1 had used them: counting uses, one would have kept them.
    assert swept.proven_blocks == 4
    (content,) = blame.contents
    assert (content.begin_token, content.end_token, content.misses) == (0, 64, 1)
    assert (
        "One-off prompts 1 evicted 6 blocks (96 tokens), and nobody asked for their own blocks "
        "again. 4 of the evicted ones were asked for again: 100.00 % of the recomputed tokens"
    ) in said
    assert "scan 6 4 64 1 1.00 s" in said


def test_a_sliding_window_fills_the_pool_with_what_it_let_go(bench: Bench) -> None:
    """A prompt of 160 tokens, then three long answers one after the other, of which each holds 16
    blocks and a window of at most 3, then the prompt again: it finds nothing, though usage never
    was over a third. The window's contents, which nobody could use, had taken the room: what is in
    the pool in the end is what vLLM's own pool says."""
    engine = bench.engine(64, specs=[full_attention(16), sliding_window(16, 32)])
    run(engine, bench.request("first", tokens(1, 160), 1), 0.01)
    for number in range(3):
        run(engine, bench.request(f"long{number}", tokens(2 + number, 16), 240), 0.01)
    run(engine, bench.request("again", tokens(1, 160), 1), 0.01)
    from vllm.v1.core.kv_cache_utils import get_group_id

    hashes = [block.block_hash for block in engine.pool.blocks]
    contents = Counter(get_group_id(content) for content in hashes if content is not None)
    summary, said = explained(engine)
    assert summary.prefix_cache.true.requests_hit == 0
    assert summary.usage.combined is not None
    assert summary.usage.combined.peak_pct < 34
    full, window = summary.groups
    assert (full.kind, window.kind) == ("FullAttentionSpec", "SlidingWindowSpec")
    assert (full.left, window.left) == (contents[0], contents[1])
    assert full.cached - full.evicted == full.left
    assert full.evicted + window.evicted == summary.evictions.total.blocks > 0
    assert window.share == pytest.approx(contents[1] / contents.total())
    assert window.left > 0.3 * contents.total()
    assert f"Group 1: SlidingWindowSpec {window.cached} {window.evicted} {window.left}" in said
