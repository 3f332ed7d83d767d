# SPDX-License-Identifier: Apache-2.0
"""The prefix cache is dropped between rounds, as training loops and sleep mode do: no capacity."""

from __future__ import annotations

import pytest

import analysis
from analysis.prefix.miss_summary import Missed
from analysis.renderers.text import summary as text
from analysis.summary import Summary
from tests.situations.bench import Bench, Tables
from tests.support.scheduler import tokens

PROMPTS, LENGTH, ROUNDS, USABLE = 20, 321, 4, 999
FULL = LENGTH // 16


def in_rounds(bench: Bench, *, resets: bool = True) -> Tables:
    """Twenty prompts of 321 tokens, 20 full blocks each, four rounds; a reset after each."""
    engine = bench.engine(USABLE)
    for number in range(ROUNDS):
        engine.run(
            *(
                bench.request(f"{number}-{prompt}", tokens(prompt, LENGTH), 4)
                for prompt in range(PROMPTS)
            )
        )
        engine.wait(5)
        if resets:
            assert engine.scheduler.reset_prefix_cache()
    return engine.end()


def summarized(tables: Tables) -> Summary:
    return analysis.summarize(analysis.open_session(tables.folder))


def test_what_resets_lost_is_no_capacity(bench: Bench) -> None:
    """The first round computes 20 x 20 new blocks; each of the other three asks for all of them
    again, in vain: 1,200 blocks."""
    found = summarized(in_rounds(bench))

    every = PROMPTS * FULL
    assert found.misses.by_reason == {
        "reset": Missed(blocks=3 * every, tokens=3 * every * 16, requests=3 * PROMPTS),
        "compulsory": Missed(blocks=every, tokens=every * 16, requests=PROMPTS),
    }
    assert (found.misses.recomputed_tokens, found.misses.ceiling) == (0, 0.0)
    assert found.misses.short.blocks == 0
    assert found.evictions.regretted.blocks == 0
    lost = found.evictions.on_purpose["reset"]
    assert (lost.blocks, lost.requests, lost.recomputed_tokens) == (1200, 60, 19_200)
    assert lost.after.p50_sec == pytest.approx(0.01)
    # The last round's contents were not asked for again.
    assert (found.evictions.total.blocks, found.evictions.harmless) == (1600, 400)
    assert found.lifetimes.lifetime.count == 0
    assert (found.ages.later, found.blame.recomputed_tokens) == (None, 0)
    assert not [one for one in found.advice if one.about == "pool"]


def test_the_text_says_that_resets_lost_it(bench: Bench) -> None:
    shown = " ".join(text.render(summarized(in_rounds(bench))).split())
    assert "Reset: lost to a reset 1,200 19,200" in shown
    assert "Lost to resets 1,200 (75.00 %) asked for again by 60 requests" in shown
    assert "Lost to resets 19,200 tokens computed again; no request needed their room" in shown
    assert "Evicted too early" not in shown


def test_without_resets_the_same_pool_finds_it_all(bench: Bench) -> None:
    found = summarized(in_rounds(bench, resets=False))
    assert list(found.misses.by_reason) == ["compulsory"]
    assert found.evictions.total.blocks == 0
    assert found.prefix_cache.true.hit_tokens == 3 * PROMPTS * FULL * 16


def test_what_was_evicted_on_request_is_no_capacity(bench: Bench) -> None:
    """a leaves four full blocks. The second is evicted on request, so b finds one, computes the
    second again, and the third and fourth lie behind it, whatever the pool's size."""
    engine = bench.engine(20)
    prompt = tokens(1, 65)
    engine.add(bench.request("a", prompt, 1))
    output = engine.schedule()
    (data,) = output.scheduled_new_reqs
    second = data.block_ids[0][1]
    engine.update(output)
    engine.wait(1)
    engine.pool.evict_blocks({second})
    engine.run(bench.request("b", prompt, 1))
    found = summarized(engine.end())

    assert found.misses.by_reason == {
        "compulsory": Missed(4, 64, 1),
        "behind": Missed(2, 32, 1),
        "explicit": Missed(1, 16, 1),
    }
    # The one block that b found, of two prompts.
    assert found.misses.ceiling == 16 / 130
    assert found.evictions.on_purpose["explicit"].recomputed_tokens == 16
    assert (found.misses.recomputed_tokens, found.evictions.regretted.blocks) == (0, 0)


def test_a_loss_to_room_after_a_reset_is_capacity(bench: Bench) -> None:
    """a's four blocks are dropped, computed again by b, and evicted for c, which needs all 20. d
    then evicts five of c's."""
    engine = bench.engine(20)
    prompt = tokens(1, 65)
    engine.run(bench.request("a", prompt, 1))
    assert engine.scheduler.reset_prefix_cache()
    engine.run(bench.request("b", prompt, 1))
    engine.run(bench.request("c", tokens(2, 320), 1))
    engine.run(bench.request("d", prompt, 1))
    found = summarized(engine.end())

    assert found.misses.by_reason["reset"] == Missed(4, 64, 1)
    assert found.misses.by_reason["capacity"] == Missed(4, 64, 1)
    assert found.evictions.regretted.blocks == found.evictions.on_purpose["reset"].blocks == 4
    assert found.blame.worst[0].request_id == "c"
    assert found.lifetimes.lifetime.count == 4 + 5
