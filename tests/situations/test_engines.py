# SPDX-License-Identifier: Apache-2.0
"""Engines that are not the plain one: two in one process, and one that speculates."""

from __future__ import annotations

from typing import Any

from tests.situations.bench import Bench, Engine
from tests.support.scheduler import tokens


def test_two_schedulers_in_one_process_have_a_session_each(bench: Bench) -> None:
    """They take steps in turn, over pools of their own; what one does is not in the other's
    tables, and their content ids do not compare."""
    first, second = bench.engine(20), bench.engine(40)
    prompt = tokens(1, 64)
    first.add(bench.request("a", prompt, 3), bench.request("same", prompt, 1))
    second.add(bench.request("b", prompt, 2))
    for _ in range(3):
        first.step()
        second.step()
    tables, others = first.end(), second.end()

    assert others.folder.name == f"{tables.folder.name}_2"
    assert tables.metadata["complete"]
    assert others.metadata["complete"]
    assert tables.lookups() == [("a", 64, 0, "first", 1, 1), ("same", 64, 48, "first", 1, 1)]
    assert others.lookups() == [("b", 64, 0, "first", 1, 1)]
    assert tables.usage()[0] == (25.0, 5, 0, 15, 2, 0)
    assert others.usage()[0] == (10.0, 4, 0, 36, 1, 0)
    rows, other_rows = tables.requests(), others.requests()
    assert set(rows) == {"a", "same"}
    assert set(other_rows) == {"b"}
    assert rows["a"]["hash_ids"] == rows["same"]["hash_ids"]
    for ids in ("hash_ids", "prefix_ids"):
        assert len(other_rows["b"][ids]) == 4
        assert not set(rows["a"][ids]) & set(other_rows["b"][ids])


def speculate(engine: Engine, request_id: str, accepted: int, drafted: int = 3) -> None:
    """A step in which the model takes this many draft tokens; then it drafts anew."""
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    output = engine.schedule()
    engine.update(
        output,
        ModelRunnerOutput(
            req_ids=[request_id],
            req_id_to_index={request_id: 0},
            sampled_token_ids=[[7] * (accepted + 1)],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
    engine.scheduler.update_draft_token_ids(DraftTokenIds([request_id], [[7] * drafted]))


def test_draft_tokens_take_slots_and_are_cached_only_when_they_are_accepted(bench: Bench) -> None:
    """28 tokens of prompt, three draft tokens a step, seven tokens of output.

    Step 1: 28 tokens, two blocks, the first full and cached; one token out.
    Step 2: four tokens (28 to 31) fit in the two blocks; one draft is accepted, two tokens out.
    Step 3: four tokens (30 to 33) need a third block; all accepted, four out. The request ends
    with 34 tokens computed; the second block is full, but vLLM caches when it allocates.
    """
    engine = bench.engine(20, speculative_config=ngram(3))
    engine.add(bench.request("r", tokens(1, 28), 7))
    for accepted in (0, 1, 3):
        speculate(engine, "r", accepted)
    tables = engine.end()

    assert tables.metadata["scheduler"]["speculative_tokens"] == 3
    assert tables.moves() == [
        ("allocate", 2, "r", 0),
        ("cache", 1, "r", 0),
        ("allocate", 1, "r", 0),
        ("free", 3, "r", 0),
    ]
    assert tables.usage() == [
        (10.0, 2, 0, 18, 1, 0),
        (15.0, 3, 0, 17, 1, 0),
        (0.0, 0, 1, 19, 0, 0),
    ]
    columns = ("scheduled_tokens", "prefill_tokens", "decode_tokens")
    assert tables.steps(*columns) == [(28, 28, 0), (4, 0, 4), (4, 0, 4)]
    row = tables.requests()["r"]
    assert (row["output_length"], row["computed_tokens"], row["num_blocks"]) == (7, 34, 3)
    assert (len(row["hash_ids"]), len(row["output_hash_ids"])) == (2, 0)


def test_a_prompt_that_is_cached_but_for_a_token_is_padded_with_drafts(bench: Bench) -> None:
    """49 tokens, 48 of them cached: vLLM pads the one that is left to four, the size of a step
    that speculates. One token is prefill, three are drafts, and all three are rejected."""
    engine = bench.engine(20, speculative_config=ngram(3))
    prompt = tokens(1, 49)
    engine.run(bench.request("a", prompt, 1))
    engine.run(bench.request("b", prompt, 1))
    tables = engine.end()

    assert tables.lookups(request_id="b") == [("b", 49, 48, "first", 1, 1)]
    assert tables.steps("prefill_tokens", "decode_tokens") == [(49, 0), (1, 3)]
    assert tables.requests()["b"]["computed_tokens"] == 49


def ngram(drafted: int) -> dict[str, Any]:
    """Speculation that needs no second model."""
    return {
        "method": "ngram",
        "num_speculative_tokens": drafted,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }


def test_slots_are_reserved_ahead_for_a_draft_model(bench: Bench, model: object) -> None:
    """A draft model writes three tokens ahead: 30 tokens of prompt and 3 of lookahead need a third
    block at once, which the second step (31 to 34, and three ahead: 37) fits in."""
    engine = bench.engine(
        20,
        speculative_config={
            "method": "draft_model",
            "model": str(model),
            "num_speculative_tokens": 3,
        },
    )
    assert engine.scheduler.num_lookahead_tokens == 3
    engine.add(bench.request("r", tokens(1, 30), 3))
    for accepted in (0, 1):
        speculate(engine, "r", accepted)
    tables = engine.end()

    assert tables.moves() == [
        ("allocate", 3, "r", 0),
        ("cache", 1, "r", 0),
        ("free", 3, "r", 0),
    ]
    assert tables.usage()[0] == (15.0, 3, 0, 17, 1, 0)
