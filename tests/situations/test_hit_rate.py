# SPDX-License-Identifier: Apache-2.0
"""The hit rate is a surprise: situations 6, 7, 8 and 12."""

from __future__ import annotations

from collections import Counter
from typing import Any

import analysis
from tests.situations.bench import BLOCK, Bench, Engine, PrefixCounts
from tests.support.scheduler import tokens


def test_eight_identical_prompts_in_one_step_share_all_but_their_last_block(
    bench: Bench,
) -> None:
    """Eight times 1,024 tokens, 64 blocks: the first request computes all of them.

    The last token is always computed, so the other seven find 63 blocks, 1,008 tokens, and take
    one block each for the last 16 tokens: 7 x 1,008 / (8 x 1,024) = 86.13 % of the tokens,
    64 + 7 = 71 blocks for 64 contents.
    """
    engine = bench.engine(255)
    prompt = tokens(8, 1024)
    assert engine.run(*(bench.request(f"r{number}", prompt, 1) for number in range(8))) == 1
    # Needs every block there is, so all that was cached goes.
    engine.run(bench.request("sweeper", tokens(9, 255 * 16), 1), seconds=5)
    tables = engine.end()

    others = [f"r{number}" for number in range(1, 8)]
    assert tables.lookups() == [
        ("r0", 1024, 0, "first", 1, 1),
        *((name, 1024, 1008, "first", 1, 1) for name in others),
        ("sweeper", 4080, 0, "first", 1, 1),
    ]
    assert tables.steps("scheduled_tokens", "prefill_tokens", "scheduled_reqs") == [
        (1024 + 7 * 16, 1024 + 7 * 16, 8),
        (4080, 4080, 1),
    ]
    assert tables.moves(step=1) == [
        ("allocate", 64, "r0", 0),
        ("cache", 64, "r0", 0),
        *(
            (event, blocks, name, 0)
            for name in others
            for event, blocks in (("reuse", 63), ("allocate", 1), ("cache", 1))
        ),
        # Until the last of them goes, only the blocks that nobody else holds are freed.
        *(("free", 1, f"r{number}", 0) for number in range(7)),
        ("free", 64, "r7", 0),
    ]
    assert tables.usage()[:2] == [
        (27.84, 71, 0, 184, 8, 0),  # 71 of 255
        (0.0, 0, 71, 184, 0, 0),
    ]

    evicted = tables.select(
        "kv_cache_evictions",
        "content_id",
        "copies_left",
        "reuse_count",
        "lifetime_sec",
        "idle_sec",
        "evictable_sec",
        "reason",
        "origin",
        "evicting_request",
    )
    assert len(evicted) == 71
    assert {row[3:] for row in evicted} == {(5.0, 5.0, 5.0, "reallocated", "prompt", "sweeper")}
    contents = Counter(content for content, *_ in evicted)
    assert Counter(contents.values()) == {1: 63, 8: 1}
    (last_block,) = (content for content, count in contents.items() if count == 8)
    assert [row[1] for row in evicted if row[0] == last_block] == [7, 6, 5, 4, 3, 2, 1, 0]
    # 64 contents were lost: 71 evictions, 7 of which left a copy.
    assert Counter(row[1] for row in evicted if row[0] != last_block) == {0: 63}
    assert Counter(row[2] for row in evicted) == {7: 63, 0: 8}


def test_the_analyzer_names_requests_and_tokens_of_eight_identical_prompts(bench: Bench) -> None:
    """87.5 % of the requests and 86.13 % of the tokens: neither stands for the other."""
    engine = bench.engine(255)
    prompt = tokens(8, 1024)
    engine.run(*(bench.request(f"r{number}", prompt, 1) for number in range(8)))
    found = analysis.summarize(analysis.open_session(engine.end().folder)).prefix_cache

    assert (found.true.requests, found.true.requests_hit) == (8, 7)
    assert found.true.request_rate == 0.875
    assert (found.true.query_tokens, found.true.hit_tokens) == (8192, 7056)
    assert found.true.token_rate == 7056 / 8192


def test_identical_prompts_in_chunks_are_computed_again_and_again(bench: Bench) -> None:
    """In chunks of 256 tokens (16 blocks) each request finds what the ones before it have
    computed so far, and then both go on computing the same.

    Step 1: r0 computes 0 to 256; r1 finds these 256 and computes to 512; r2 finds 512 and
    computes to 768; r3 finds 768 and computes to 1,024; r4 to r7 find 1,008 and compute 16.
    Then r0 has 768 tokens to go, r1 512, r2 256, which others have computed already.
    Computed: 1,024 + 768 + 512 + 256 + 4 x 16 = 2,624 tokens instead of 1,136.
    Blocks with content: 64 + 48 + 32 + 16 + 4 = 164 for 64 contents.
    """
    engine = bench.engine(255, max_num_batched_tokens=2048, long_prefill_token_threshold=256)
    prompt = tokens(8, 1024)
    # The longest prefill takes four steps: 1,024 / 256.
    assert engine.run(*(bench.request(f"r{number}", prompt, 1) for number in range(8))) == 4
    assert engine.pool.get_usage() == 0
    engine.run(bench.request("sweeper", tokens(9, 255 * 16), 1))
    tables = engine.end()

    found = [0, 256, 512, 768, 1008, 1008, 1008, 1008]
    assert tables.lookups()[:8] == [
        (f"r{number}", 1024, hit, "first", 1, 1) for number, hit in enumerate(found)
    ]
    computed = [row["computed_tokens"] - row["hit_tokens"] for row in tables.requests().values()]
    assert sum(computed[:8]) == 2624
    assert tables.steps("prefill_tokens")[:4] == [
        (4 * 256 + 4 * 16,),
        (3 * 256,),
        (2 * 256,),
        (256,),
    ]
    assert sum(blocks for event, blocks, *_ in tables.moves(event="cache")) == 164 + 255
    evicted = tables.select("kv_cache_evictions", "content_id", "copies_left")
    assert len(evicted) == 164
    # The first 16 blocks were computed once, the next 16 twice, then three and four times, and
    # the last block by all eight.
    copies = Counter(Counter(content for content, _ in evicted).values())
    assert copies == {1: 16, 2: 16, 3: 16, 4: 15, 8: 1}
    assert sum(1 for _, copies_left in evicted if copies_left == 0) == 64


def test_requests_that_come_back_and_requests_that_wait_are_not_hits(bench: Bench) -> None:
    """Ten usable blocks; a and b start with four each (64 tokens), c shares a's prompt.

    Step s computes the token at position 62 + s of a and b; both need a fifth block in step 2 and
    a sixth in step 18 (position 80). There is none then: b, which came last, is preempted, and a
    takes b's fifth block. c (112 tokens, seven blocks, four of them a's) is looked up from step 2
    to 17 and does not fit; then b is in front of it.

    b has 81 tokens and finds its own first 64 again, in steps 19 to 24 to no avail (it needs six
    blocks, four are free) and in step 25, after a has ended with its 24th token. It ends in step
    31, and in step 32 c is admitted, after seven more lookups.
    """
    engine = bench.engine(10)
    prompt = tokens(1, 64)
    engine.add(bench.request("a", prompt, 24), bench.request("b", tokens(2, 64), 24))
    engine.step()
    assert engine.run(bench.request("c", prompt + tokens(3, 48), 1)) == 31
    tables = engine.end()

    assert tables.lookups() == [
        ("a", 64, 0, "first", 1, 1),
        ("b", 64, 0, "first", 1, 1),
        ("c", 112, 64, "first", 0, 1),
        ("b", 81, 64, "resumed", 0, 6),
        ("b", 81, 64, "resumed", 1, 1),
        ("c", 112, 64, "retry", 0, 15 + 7),
        ("c", 112, 64, "retry", 1, 1),
    ]
    # vLLM 0.32 counts a request when it is admitted, and keeps those that come back apart.
    assert engine.vllm_counts == PrefixCounts(3, 64 + 64 + 112, 64, 1, 81, 64)
    requests = tables.requests()
    assert {name: row["hit_tokens"] for name, row in requests.items()} == {"a": 0, "b": 0, "c": 64}
    assert [requests[name]["preemptions"] for name in "abc"] == [0, 1, 0]

    found = analysis.summarize(analysis.open_session(tables.folder)).prefix_cache
    assert (found.true.query_tokens, found.true.hit_tokens) == (240, 64)
    assert found.vllm.token_rate == found.true.token_rate == 64 / 240
    # Counted as releases up to 0.11.0 did, it would be 1,984 of 3,383 tokens: 58.65 %.
    everything = found.repeated + found.resumed
    assert found.true.query_tokens + everything.query_tokens == 128 + 24 * 112 + 7 * 81
    assert found.true.hit_tokens + everything.hit_tokens == 24 * 64 + 7 * 64


def test_a_hit_rate_in_requests_and_one_in_tokens_by_interval_and_its_ceiling(
    bench: Bench,
) -> None:
    """Five requests, one a second. Four have 48 tokens, the first 32 of them shared; the fifth
    has 1,024 of its own, needs all 64 blocks, and comes in the middle.

    Hits: none, 32, none (the long one), none (it swept the prefix out), 32. That is 40 % of the
    requests and 64 of 1,216 tokens: 5.26 %. A cache that never evicts would find 96: 60 % and
    7.89 %.
    """
    engine = bench.engine(64)
    shared = tokens(1, 32)
    prompts = {name: shared + tokens(seed, 16) for seed, name in enumerate("abcd", start=2)}
    order = ["a", "b", "long", "c", "d"]
    prompts["long"] = tokens(9, 1024)
    for name in order:
        engine.run(bench.request(name, prompts[name], 1), seconds=1)
    tables = engine.end()

    timed = tables.select(
        "prefix_cache_lookups", "timestamp_sec", "request_id", "query_tokens", "hit_tokens"
    )
    assert timed == [
        (1.0, "a", 48, 0),
        (2.0, "b", 48, 32),
        (3.0, "long", 1024, 0),
        (4.0, "c", 48, 0),
        (5.0, "d", 48, 32),
    ]
    assert round(100 * 64 / (4 * 48 + 1024), 2) == 5.26

    seen: set[int] = set()
    ceiling = {}
    rows = tables.requests()
    for name in order:
        ids = rows[name]["hash_ids"]
        # The last token is always computed, so the last of these full blocks is no hit.
        known = next((at for at, block in enumerate(ids[:-1]) if block not in seen), len(ids) - 1)
        ceiling[name] = known * BLOCK
        seen.update(ids)
    assert ceiling == {"a": 0, "b": 32, "long": 0, "c": 32, "d": 32}
    assert [len(rows[name]["hash_ids"]) for name in order] == [3, 3, 64, 3, 3]


def test_a_request_that_must_not_read_the_cache_is_no_miss(bench: Bench) -> None:
    """b asks for the log-probabilities of its prompt, so it must compute all of it: 64 tokens
    that are cached, and are cached a second time. Neither it nor vLLM counts it."""
    engine = bench.engine(20)
    prompt = tokens(1, 64)
    engine.run(bench.request("a", prompt, 1))
    engine.run(bench.request("b", prompt, 1, prompt_logprobs=1))
    engine.run(bench.request("c", prompt, 1))
    tables = engine.end()

    assert tables.lookups() == [
        ("a", 64, 0, "first", 1, 1),
        ("b", 64, 0, "skipped", 1, 1),
        ("c", 64, 48, "first", 1, 1),
    ]
    assert engine.vllm_counts == PrefixCounts(requests=2, queries=128, hits=48)
    assert tables.moves(request_id="b") == [
        ("allocate", 4, "b", 0),
        ("cache", 4, "b", 0),
        ("free", 4, "b", 0),
    ]
    rows = tables.requests()
    assert rows["a"]["hash_ids"] == rows["b"]["hash_ids"] == rows["c"]["hash_ids"]
    found = analysis.summarize(analysis.open_session(tables.folder)).prefix_cache
    assert (found.true.requests, found.true.query_tokens, found.true.hit_tokens) == (2, 128, 48)
    assert found.skipped.lookups == 1


def test_a_request_that_must_not_read_the_cache_stays_that_while_it_waits(bench: Bench) -> None:
    """Nine usable blocks: a holds five (from its second step on), b needs five. a gives its 17th
    and last token in step 17; b is looked up from step 2 on, and admitted in step 18."""
    engine = bench.engine(9)
    prompt = tokens(1, 64)
    engine.add(bench.request("a", prompt, 17))
    engine.step(2)
    engine.run(bench.request("b", prompt + tokens(2, 16), 1, prompt_logprobs=1))
    tables = engine.end()

    assert tables.lookups(request_id="b") == [
        ("b", 80, 0, "skipped", 0, 15),
        ("b", 80, 0, "skipped", 1, 1),
    ]
    assert engine.vllm_counts == PrefixCounts(requests=1, queries=64, hits=0)


def test_a_pooling_request_that_needs_every_token_is_no_miss_and_has_no_first_token(
    bench: Bench,
) -> None:
    """Embeddings of every token: 64 tokens are computed though they are cached. Where the last
    one is enough, the cache is read: 48 tokens are found. Neither answers with a token."""
    engine = bench.engine(20)
    prompt = tokens(1, 64)
    engine.run(bench.request("a", prompt, 1))
    for name, every_token in (("every", True), ("last", False)):
        engine.add(pooling_request(name, prompt, every_token))
        embed(engine)
    tables = engine.end()

    assert tables.lookups() == [
        ("a", 64, 0, "first", 1, 1),
        ("every", 64, 0, "skipped", 1, 1),
        ("last", 64, 48, "first", 1, 1),
    ]
    assert tables.steps("prefill_tokens", "decode_tokens") == [(64, 0), (64, 0), (16, 0)]
    for name in ("every", "last"):
        row = tables.requests()[name]
        assert (row["output_length"], row["first_token_sec"]) == (0, None)
        assert (row["finish_reason"], row["num_blocks"]) == ("stop", 4)


def pooling_request(name: str, prompt: list[int], every_token: bool) -> Any:
    """A request for embeddings."""
    from vllm.pooling_params import PoolingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=None,
        pooling_params=PoolingParams(
            task="token_embed" if every_token else "embed", skip_reading_prefix_cache=every_token
        ),
        block_hasher=get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256")),
    )


def embed(engine: Engine) -> None:
    """A step of one request whose result is an embedding."""
    import torch
    from vllm.v1.outputs import ModelRunnerOutput

    output = engine.schedule()
    (name,) = output.num_scheduled_tokens
    engine.update(
        output,
        ModelRunnerOutput(
            req_ids=[name],
            req_id_to_index={name: 0},
            sampled_token_ids=[],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[torch.zeros(1)],
        ),
    )
