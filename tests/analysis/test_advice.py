# SPDX-License-Identifier: Apache-2.0
"""Each piece of advice where it is due, and none where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.judgement.advice import Advice, pool
from tests.analysis.builder import METADATA, SessionBuilder
from tests.misses.test_by_hand import allocation, eviction, lookup, request


def advice(session: SessionBuilder) -> dict[str, Advice]:
    given = summarize(open_session(session.folder)).advice
    by_subject = {piece.about: piece for piece in given}
    assert len(by_subject) == len(given), "two of them move the same setting"
    return by_subject


def scheduler(session: SessionBuilder, **settings: Any) -> None:
    session.metadata(
        scheduler={"max_num_seqs": 16, "max_num_batched_tokens": 2048, **settings},
    )


def served(session: SessionBuilder, count: int = 20, queued: float = 0.0) -> None:
    """So many requests that ended well, each after waiting for so long."""
    session.requests(
        *(
            {
                "request_id": f"served-{number}",
                "timestamp": 100 * number,
                "input_length": 18,
                "output_length": 3,
                "block_size": 16,
                "hash_ids": [5_000 + number, 6_000 + number],
                "queue_sec": queued,
                "first_token_sec": 0.1 * number + queued + 0.5,
                "finish_sec": 0.1 * number + queued + 1,
                "finish_reason": "stop",
            }
            for number in range(count)
        )
    )


GROUP = {"kind": "FullAttentionSpec", "block_size": 16, "bytes_per_block": 8192}


def evicted_and_missed(session: SessionBuilder, handed_out: int) -> None:
    """Three of four prompts were computed a second time, after so many blocks had gone by."""
    session.usage((0, 20), (9, 95))
    session.requests(request("a", 1, 2, [11, 12, 13]), request("d", 8, 9, [11, 12, 13]))
    session.lookups(lookup("a", 1, 3), lookup("d", 8, 3))
    handed = {**allocation(3, handed_out, "x"), "evicted_blocks": 3}
    session.rows("kv_cache_allocations.csv", handed)
    steps(session, waiting_reqs=0)
    session.evictions(*(eviction(3, content, "x") for content in (13, 12, 11)))


def test_a_quiet_session_needs_none(session: SessionBuilder) -> None:
    session.usage((0, 50), (5, 60))
    served(session)
    assert advice(session) == {}


def test_nothing_recorded_needs_none(session: SessionBuilder) -> None:
    assert advice(session) == {}


@pytest.mark.parametrize(
    ("handed_out", "flag", "value", "confidence"),
    [
        # 100 usable blocks and the null block, each of 8,192 bytes.
        (20, "--kv-cache-memory-bytes", str(121 * 8192), "medium"),
        (80, "--kv-cache-memory-bytes", str(181 * 8192), "medium"),
        (200_000, "--kv-offloading-size", "2", "low"),
    ],
)
def test_a_larger_pool(
    session: SessionBuilder, handed_out: int, flag: str, value: str, confidence: str
) -> None:
    session.metadata(groups=[GROUP], settings=["kv-cache-memory-bytes", "kv-offloading-size"])
    evicted_and_missed(session, handed_out)
    piece = advice(session)["pool"]
    assert (piece.flag, piece.value, piece.confidence) == (flag, value, confidence)
    # 48 tokens of the second prompt, of 2 x 50 that were computed.
    assert "48 prompt tokens were computed again" in piece.evidence[0]
    assert "48.00 % of all prefill" in piece.evidence[0]


def test_a_pool_of_a_fixed_size(session: SessionBuilder) -> None:
    """Whatever the memory, vLLM makes as many blocks as its settings say."""
    cache = {"blocks": 101, "num_gpu_blocks_override": 101}
    session.metadata(
        cache=cache,
        groups=[GROUP],
        settings=["kv-cache-memory-bytes", "kv-offloading-size", "num-gpu-blocks-override"],
    )
    evicted_and_missed(session, 200_000)
    piece = advice(session)["pool"]
    assert (piece.flag, piece.value) == ("--num-gpu-blocks-override", "200101")
    assert "host memory" not in piece.expect


@pytest.mark.parametrize(("device", "handed_out"), [("cpu", 200_000), ("cuda", 200)])
def test_host_memory_is_for_gpus_and_for_much(
    session: SessionBuilder, device: str, handed_out: int
) -> None:
    settings = ["kv-cache-memory-bytes", "kv-offloading-size"]
    session.metadata(device=device, groups=[GROUP], settings=settings)
    evicted_and_missed(session, handed_out)
    piece = advice(session)["pool"]
    assert piece.flag == "--kv-cache-memory-bytes"
    assert "host memory" not in piece.expect
    assert ("on each GPU" in piece.says) == (device == "cuda")


def test_host_memory_is_not_for_what_runs(session: SessionBuilder) -> None:
    """Preempted requests need their blocks on the GPU."""
    settings = ["kv-cache-memory-bytes", "kv-offloading-size"]
    session.metadata(groups=[GROUP], settings=settings)
    evicted_and_missed(session, 200_000)
    summary = summarize(open_session(session.folder))
    preempted = replace(summary, preemptions=replace(summary.preemptions, tax=0.5))
    flags = []
    for found in (summary, preempted):
        candidate = pool.more_blocks(found)
        assert candidate is not None
        flags.append(candidate.advice.flag)
        assert ("host memory" in candidate.advice.expect) is (found is summary)
        assert ("--max-num-seqs" in candidate.advice.expect) is (found is preempted)
    assert flags == ["--kv-offloading-size", "--kv-cache-memory-bytes"]


def test_nothing_is_sure_where_the_tables_do_not_fit(session: SessionBuilder) -> None:
    evicted_and_missed(session, 20)
    (session.folder / "kv_cache_allocations.csv").unlink()
    summary = summarize(open_session(session.folder))
    assert "kv_cache_allocations.csv has 0 evictions" in summary.warnings[-1]
    assert [piece.confidence for piece in summary.advice] == ["low"]


def test_a_release_without_the_flag_is_not_advised_to_set_it(session: SessionBuilder) -> None:
    session.metadata(settings=["max-num-seqs"])
    evicted_and_missed(session, 20)
    piece = advice(session)["pool"]
    assert (piece.flag, piece.value) == (None, None)


def test_an_old_session_is_advised_what_every_release_has(session: SessionBuilder) -> None:
    evicted_and_missed(session, 20)
    piece = advice(session)["pool"]
    assert (piece.flag, piece.value) == ("--gpu-memory-utilization", "0.95")


def test_a_pool_that_is_too_large(session: SessionBuilder) -> None:
    session.usage((0, 10), (5, 0))
    served(session)
    piece = advice(session)["pool"]
    assert piece.flag is None
    assert "at most 10.0 % of 100 blocks" in piece.evidence[0]


def steps(session: SessionBuilder, **row: Any) -> None:
    """Ten seconds in which 16 requests ran and 5 waited."""
    session.rows(
        "scheduler_steps.csv",
        *(
            {
                "timestamp_sec": second,
                "step": second + 1,
                "running_reqs": 16,
                "waiting_reqs": 5,
                "scheduled_tokens": 16,
                "scheduled_reqs": 16,
                "prefill_tokens": 0,
                "decode_tokens": 16,
                "finished_reqs": 0,
                "schedule_us": 100,
                **row,
            }
            for second in range(10)
        ),
    )


def test_more_requests_at_once(session: SessionBuilder) -> None:
    scheduler(session)
    session.usage((0, 50), (9, 50))
    served(session, queued=2)
    steps(session)
    piece = advice(session)["requests at once"]
    # From 50 % of the pool to 80 %: 16 x 1.6, a multiple of 8.
    assert (piece.flag, piece.value) == ("--max-num-seqs", "24")


@pytest.mark.parametrize("peak", [85, 95])
def test_no_more_requests_at_once_where_the_pool_is_full(
    session: SessionBuilder, peak: int
) -> None:
    scheduler(session)
    session.usage((0, peak), (9, peak))
    served(session, queued=2)
    steps(session)
    assert "requests at once" not in advice(session)


def test_no_more_requests_at_once_where_nobody_waits_long(session: SessionBuilder) -> None:
    scheduler(session)
    session.usage((0, 50), (9, 50))
    served(session, queued=0.001)
    steps(session)
    assert advice(session) == {}


def test_larger_steps(session: SessionBuilder) -> None:
    scheduler(session)
    session.usage((0, 50), (9, 50))
    served(session, queued=2)
    steps(session, running_reqs=4, scheduled_tokens=2048, prefill_tokens=2044, decode_tokens=4)
    piece = advice(session)["step size"]
    assert (piece.flag, piece.value) == ("--max-num-batched-tokens", "4096")


def test_prefix_caching_that_is_off(session: SessionBuilder) -> None:
    session.metadata(cache={**METADATA["cache"], "prefix_caching": False}, prefix_lengths=[16, 32])
    session.requests(
        *(
            {"request_id": f"{number}", "input_length": 64, "prefix_ids": [1, 2]}
            for number in range(4)
        )
    )
    piece = advice(session)["prefix caching"]
    assert piece.flag == "--enable-prefix-caching"
    # All but the first share 32 of their 64 tokens.
    assert "37.50 % of all prompt tokens" in piece.evidence[0]


def test_blocks_too_large_for_what_is_shared(session: SessionBuilder) -> None:
    session.metadata(
        groups=[{"kind": "FullAttentionSpec", "block_size": 784}], prefix_lengths=[16, 32, 48]
    )
    session.lookups({"request_id": "0", "query_tokens": 300, "hit_tokens": 0})
    session.requests(
        *(
            {"request_id": f"{number}", "input_length": 300, "prefix_ids": [1, 2, 3]}
            for number in range(5)
        )
    )
    piece = advice(session)["block size"]
    assert (piece.flag, piece.value) == ("--block-size", "32")


@pytest.mark.parametrize(("device", "value"), [("cuda", "16"), ("cpu", None)])
def test_no_block_size_that_the_device_does_not_take(
    session: SessionBuilder, device: str, value: str | None
) -> None:
    """Prompts share 16 tokens. vLLM's attention on CPUs takes blocks of 32 and more."""
    session.metadata(
        groups=[{"kind": "FullAttentionSpec", "block_size": 784}],
        prefix_lengths=[16, 32, 48],
        device=device,
    )
    session.lookups({"request_id": "0", "query_tokens": 300, "hit_tokens": 0})
    session.requests(
        *(
            {"request_id": f"{n}", "input_length": 300, "prefix_ids": [1, 10 + n, 20 + n]}
            for n in range(5)
        )
    )
    piece = advice(session).get("block size")
    assert (piece and piece.value) == value


def test_of_two_rules_for_one_setting_the_first_counts(session: SessionBuilder) -> None:
    """Prompts share 48 tokens, and blocks of 784 are 61 % empty: 32 for the first, 128 for the
    second."""
    session.metadata(
        groups=[{"kind": "FullAttentionSpec", "block_size": 784}], prefix_lengths=[16, 32, 48]
    )
    session.usage((0, 50), (9, 50))
    session.lookups({"request_id": "0", "query_tokens": 300, "hit_tokens": 0})
    session.requests(
        *(
            {
                "request_id": f"{number}",
                "input_length": 300,
                "output_length": 3,
                "block_size": 784,
                "num_blocks": 1,
                "computed_tokens": 302,
                "preemptions": 0,
                "prefix_ids": [1, 2, 3],
            }
            for number in range(12)
        )
    )
    piece = advice(session)["block size"]
    assert piece.value == "32"
    assert "share up to 48 tokens" in piece.evidence[0]


def test_turns_that_go_to_another_rank(session: SessionBuilder) -> None:
    session.requests(request("a", 1, 2, [11, 12], engine=0), request("b", 5, 6, [11, 12], engine=1))
    session.lookups(lookup("a", 1, 2, engine=0), lookup("b", 5, 2, engine=1))
    piece = advice(session)["routing"]
    assert piece.flag is None
    assert "32 prompt tokens of 1 requests" in piece.evidence[0]


def test_a_timestamp_in_front(session: SessionBuilder) -> None:
    session.metadata(prefix_lengths=[16, 32, 48])
    for number in range(20):
        session.requests(
            request(
                f"{number}",
                number / 10,
                3,
                [1, 2, 100 + number],
                prefix_ids=[1, 2, 100 + number],
            )
        )
        session.lookups(lookup(f"{number}", number / 10, 3, hit=2 * (number > 0)))
    piece = advice(session).get("prompts")
    assert piece is not None
    assert "20 prompts share their first 32 tokens and part before token 48" in piece.evidence[0]


def test_requests_that_cannot_fit(session: SessionBuilder) -> None:
    session.usage((0, 0), (9, 50))
    session.lookups(lookup("giant", 1, 200, admitted=0, lookups=900))
    piece = advice(session)["length"]
    assert (piece.flag, piece.value) == ("--max-model-len", "1600")
