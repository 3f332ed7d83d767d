# SPDX-License-Identifier: Apache-2.0
"""Why the hit rate is a surprise, in the analyzer's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis import open_session, summarize
from analysis.prefix.miss_summary import Missed
from analysis.renderers.text import summary as text
from analysis.summary import Summary
from profilemate import collector
from tests.kv.recording import Clock, found, hooks_only
from tests.situations.bench import Bench, Tables
from tests.support.scheduler import (
    RequestMaker,
    build_scheduler,
    drive,
    full_attention,
    sliding_window,
    tokens,
)


def summarized(tables: Tables) -> tuple[Summary, str]:
    """The summary, and its text with all white space as single spaces."""
    summary = summarize(open_session(tables.folder))
    return summary, " ".join(text.render(summary).split())


def test_a_block_of_784_finds_nothing_of_240_shared_tokens(bench: Bench) -> None:
    """Situation 1: the same 240 tokens in front of each of 12 prompts of 2,000."""
    engine = bench.engine(64, block_size=784, max_model_len=4_096)
    make, shared = RequestMaker(784), tokens(0, 240)
    for number in range(12):
        engine.run(make(f"r{number}", shared + tokens(1 + number, 1_760), 1))
    summary, said = summarized(engine.end())

    assert summary.misses.hit_tokens == 0
    short = summary.families.too_short
    assert short is not None
    assert (short.unit, short.requests, short.longest_tokens) == (784, 11, 240)
    # The largest power of two below 240: one block of it in each of the 11 that came later.
    assert (short.finding_unit, short.found_tokens) == (128, 11 * 128)
    assert "11 prompts share up to 240 tokens, and a block has 784" in said
    assert "--block-size 128" in said


def test_prompts_that_share_nothing_do_not_share_too_little(
    bench: Bench,
) -> None:
    """Situation 1, the other half."""
    engine = bench.engine(64, block_size=784, max_model_len=4_096)
    make = RequestMaker(784)
    for number in range(12):
        engine.run(make(f"r{number}", tokens(1 + number, 2_000), 1))
    summary, said = summarized(engine.end())
    assert summary.families.too_short is None
    assert "No prompt begins with 16 or more tokens of an earlier one." in said


def test_a_group_that_lacks_the_block_holds_the_others_back(bench: Bench) -> None:
    """Situation 2: a window of 40 tokens. The second prompt parts from the first after 20 blocks,
    where full attention has them all and the window's group has let them go."""
    engine = bench.engine(
        200, specs=[full_attention(16), sliding_window(16, 40)], max_model_len=4_096
    )
    shared = tokens(1, 20 * 16)
    engine.run(bench.request("first", shared + tokens(2, 20 * 16), 2))
    engine.run(bench.request("noise", tokens(3, 76 * 16), 2))
    engine.run(bench.request("second", shared + tokens(4, 100), 2))
    summary, said = summarized(engine.end())
    held_back = summary.misses.by_reason["held back"]
    assert held_back.requests == 1
    assert "Held back: another group lacked it" in said


def test_the_groups_share_the_blocks(bench: Bench) -> None:
    """Situation 21: 401 blocks of 16 tokens are 6,416 tokens, of which two groups hold half."""
    engine = bench.engine(400, specs=[full_attention(16), sliding_window(16, 40)])
    engine.run(bench.request("r", tokens(1, 100), 1))
    summary, said = summarized(engine.end())
    assert summary.facts.kv_tokens == 3_208
    assert "401 blocks of 16 tokens = 3,208 tokens of KV cache in 2 groups" in said
    assert "The 2 groups share these blocks, and a token needs a place in each" in said


def test_a_draft_head_costs_a_block_a_request_and_the_last_token_another(bench: Bench) -> None:
    """Situation 3: 64 tokens are four blocks. The last one holds the last token; of the three that
    are found the third is computed anew for the draft head."""
    engine = bench.engine(50, **drafting(bench))
    for name in ("a", "b", "c"):
        engine.run(bench.request(name, tokens(1, 64), 1))
    tables = engine.end()
    summary, said = summarized(tables)
    assert [row[2] for row in tables.lookups()] == [0, 32, 32]
    assert summary.misses.by_reason == {
        "last token": Missed(3, 48, 3),
        "compulsory": Missed(3, 48, 1),
        "speculation": Missed(2, 32, 2),
    }
    assert "Speculation: dropped for drafting" in said
    assert "Last token: ends the prompt" in said


def drafting(bench: Bench) -> dict[str, Any]:
    """A scheduler whose draft head needs the last block of each hit anew."""
    return {
        "speculative_config": {
            "method": "eagle",
            "model": str(bench.draft_head()),
            "num_speculative_tokens": 1,
        }
    }


def test_identical_prompts_in_chunks_are_being_computed(bench: Bench) -> None:
    """Situation 8: three prompts of 160 tokens at once, 64 tokens of each a step: the second
    finds what the first has computed in this very step, and computes the rest at the same time."""
    engine = bench.engine(
        100, max_num_batched_tokens=128, long_prefill_token_threshold=64, max_model_len=128 * 8
    )
    engine.run(*(bench.request(f"r{number}", tokens(1, 163), 1) for number in range(2)))
    summary, said = summarized(engine.end())
    # 10 full blocks, of which 4 were there.
    assert summary.misses.by_reason["not yet cached"] == Missed(6, 96, 1)
    assert "Not yet cached: being computed" in said
    assert "Send one request of each shared prefix first" in said


def test_two_tenants_of_which_one_puts_the_time_in_front(bench: Bench) -> None:
    """Situation 9: two system prompts of 160 tokens, 20 requests each; the second has a timestamp
    from its 47th token on."""
    engine = bench.engine(2_000)
    for number in range(20):
        steady = tokens(1, 160) + tokens(100 + number, 40)
        stamp = [3 + number] * 8
        timed = tokens(2, 46) + stamp + tokens(3, 106) + tokens(200 + number, 40)
        engine.run(bench.request(f"steady-{number}", steady, 1))
        engine.run(bench.request(f"timed-{number}", timed, 1))
    summary, said = summarized(engine.end())
    timed_family = next(f for f in summary.families.largest if f.example.startswith("timed"))
    assert (timed_family.requests, timed_family.continuations) == (20, 20)
    assert (timed_family.shared_tokens, timed_family.part_before) == (32, 48)
    assert "20 prompts share their first 32 tokens and part in 20 ways before token 48" in said
    assert "If prompts differ early in a date, an id or a name, move that to their end." in said


def test_another_adapter_and_another_salt_are_other_contents(bench: Bench) -> None:
    """Situation 11: the same 64 tokens under two adapters and two salts share nothing, and the
    second request of each finds its own."""
    from vllm.lora.request import LoRARequest

    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"lora_request": LoRARequest("german", 1, "adapter")},
        {"cache_salt": "acme"},
    )
    engine = bench.engine(100)
    for turn in range(2):
        for index, fields in enumerate(kinds):
            engine.run(bench.request(f"r{index}-{turn}", tokens(1, 66), 1, **fields))
    summary, _ = summarized(engine.end())
    assert summary.misses.by_reason == {"compulsory": Missed(3 * 4, 3 * 64, 3)}
    # 16 tokens upward of each kind's second request: 64 of each.
    assert (summary.families.sharing, summary.families.shared_tokens) == (3, 3 * 64)


def test_the_second_turn_goes_to_another_rank(model: Path, hooks_on: None, tmp_path: Path) -> None:
    """Situation 13: the first turn of a conversation is served by rank 0, the second by rank 1."""
    clock = Clock()
    name = found(tmp_path, clock)
    first = tokens(1, 130)
    for rank, prompt in ((0, first), (1, first + tokens(2, 66))):
        with hooks_only(tmp_path, clock, name=name):
            scheduler = build_scheduler(model, 50, data_parallel_index=rank)
            request = RequestMaker()(f"turn-{rank}", prompt, 1)
            drive(scheduler, [(0.0, request)], after_step=clock.tick)
        clock.tick()
    collector.finalize(tmp_path / name)
    summary, said = summarized(Tables(tmp_path / name))
    # 130 tokens are eight full blocks.
    assert summary.misses.by_reason["other rank"] == Missed(8, 128, 1)
    assert "Other rank: on another rank" in said
    assert "Send requests that share a prefix to the same data-parallel rank." in said
