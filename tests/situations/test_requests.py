# SPDX-License-Identifier: Apache-2.0
"""The rows of requests: aborted ones in every state (situation 24), what sets prompts apart
(situation 11), and sessions of requests that go on (streaming input)."""

from __future__ import annotations

from typing import Any

import analysis
from profilemate.format.events import prefix_lengths
from tests.situations.bench import Bench, Engine
from tests.support.scheduler import answer, tokens

STATE = (
    "finish_reason",
    "computed_tokens",
    "output_length",
    "num_blocks",
    "preemptions",
    "queue_sec",
    "first_token_sec",
    "finish_sec",
)


def state_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Those fields of a row that say how far the request had come."""
    return tuple(row[name] for name in STATE)


def test_a_request_aborted_before_it_was_looked_up_has_its_row(bench: Bench) -> None:
    """Prompt of 80 tokens, five blocks: known by their hashes, though nothing was computed."""
    engine = bench.engine(20)
    prompt = tokens(1, 80)
    engine.add(bench.request("gone", prompt, 5))
    engine.wait(2)
    engine.abort("gone")
    engine.run(bench.request("same", prompt, 1))
    tables = engine.end()

    rows = tables.requests()
    assert state_of(rows["gone"]) == ("abort", 0, 0, 0, 0, None, None, 2.0)
    assert rows["gone"]["input_length"] == 80
    assert len(rows["gone"]["hash_ids"]) == 5
    assert rows["gone"]["hash_ids"] == rows["same"]["hash_ids"]
    assert tables.lookups(request_id="gone") == []


def test_a_request_aborted_while_it_waits_has_its_row(bench: Bench) -> None:
    """Four lookups, none of which led to anything: four blocks, and three were free."""
    engine = bench.engine(9)
    engine.add(bench.request("runs", tokens(1, 90), 50))
    engine.step()
    engine.add(bench.request("gone", tokens(2, 64), 5))
    engine.step(4)
    engine.abort("gone")
    tables = engine.end()

    assert state_of(tables.requests()["gone"]) == ("abort", 0, 0, 0, 0, None, None, 0.05)
    assert tables.lookups(request_id="gone") == [
        ("gone", 64, 0, "first", 0, 1),
        ("gone", 64, 0, "retry", 0, 3),
    ]
    # The one that runs has no row yet: it was cut off with the process.
    assert set(tables.requests()) == {"gone"}


def test_a_request_aborted_in_its_prefill_has_its_row(bench: Bench) -> None:
    """64 of 136 tokens were computed: four blocks held, eight full ones and a part in the
    prompt."""
    engine = bench.engine(20, max_num_batched_tokens=64)
    engine.add(bench.request("gone", tokens(1, 136), 5))
    engine.step()
    engine.abort("gone")
    tables = engine.end()

    row = tables.requests()["gone"]
    assert state_of(row) == ("abort", 64, 0, 4, 0, 0.01, None, 0.01)
    assert len(set(row["hash_ids"])) == 9
    assert tables.moves() == [
        ("allocate", 4, "gone", 0),
        ("cache", 4, "gone", 0),
        ("free", 4, "gone", 0),
    ]
    assert tables.usage()[-1] == (0.0, 0, 4, 16, 0, 0)


def test_a_request_aborted_in_its_decode_has_its_row(bench: Bench) -> None:
    """40 tokens of prompt, and after ten steps ten of output, the last of them not computed: 49
    tokens in four blocks. Two blocks hold prompt alone, the third is full with both."""
    engine = bench.engine(20)
    engine.add(bench.request("gone", tokens(1, 40), 50))
    engine.step(10)
    engine.abort("gone")
    tables = engine.end()

    row = tables.requests()["gone"]
    assert state_of(row) == ("abort", 49, 10, 4, 0, 0.01, 0.01, 0.1)
    assert (len(row["hash_ids"]), len(row["output_hash_ids"])) == (3, 1)
    assert tables.moves()[-1] == ("free", 4, "gone", 0)
    assert tables.usage()[-1] == (0.0, 0, 3, 17, 0, 0)


def test_a_request_aborted_with_its_step_in_flight_has_its_row(bench: Bench) -> None:
    """Between schedule() and update_from_output(): the tokens were scheduled, no output came."""
    engine = bench.engine(20)
    engine.add(bench.request("gone", tokens(1, 32), 50), bench.request("stays", tokens(2, 32), 1))
    output = engine.schedule()
    engine.wait(1)
    result = answer(engine.scheduler, output)
    engine.abort("gone")
    engine.update(output, result)
    tables = engine.end()

    rows = tables.requests()
    assert state_of(rows["gone"]) == ("abort", 32, 0, 2, 0, 0.01, None, 1.01)
    assert state_of(rows["stays"]) == ("length", 32, 1, 2, 0, 0.01, 1.01, 1.01)
    assert [row[:4] for row in tables.usage()] == [
        (20.0, 4, 0, 16),
        (10.0, 2, 2, 16),
        (0.0, 0, 4, 16),
    ]


def preempted(bench: Bench) -> Engine:
    """An engine whose request ``gone`` was preempted in step 18: it had computed 80 tokens, of 64
    of prompt and 17 of output (see the recompute tax, whose numbers these are)."""
    engine = bench.engine(10)
    engine.add(bench.request("stays", tokens(1, 64), 20), bench.request("gone", tokens(2, 64), 50))
    engine.step(18)
    return engine


def test_a_request_aborted_while_it_is_preempted_has_its_row(bench: Bench) -> None:
    """It holds nothing, and all that it had computed is wasted."""
    engine = preempted(bench)
    engine.abort("gone")
    engine.run()
    tables = engine.end()

    row = tables.requests()["gone"]
    assert state_of(row) == ("abort", 80, 17, 0, 1, 0.01, 0.01, 0.18)
    assert (len(row["hash_ids"]), len(row["output_hash_ids"])) == (4, 1)
    found = analysis.summarize(analysis.open_session(tables.folder)).requests
    assert (found.aborted, found.aborted_computed_tokens) == (1, 80)


def test_a_request_aborted_after_it_came_back_has_its_row(bench: Bench) -> None:
    """Back in step 21 (the other ended in step 20), it computes its 81 tokens anew, less the 64 it
    finds; aborted after step 22 it holds six blocks and has computed 82."""
    engine = preempted(bench)
    engine.step(4)
    engine.abort("gone")
    tables = engine.end()

    row = tables.requests()["gone"]
    assert state_of(row) == ("abort", 82, 19, 6, 1, 0.01, 0.01, 0.22)
    assert tables.lookups(kind="resumed") == [
        ("gone", 81, 64, "resumed", 0, 2),
        ("gone", 81, 64, "resumed", 1, 1),
    ]


def test_adapters_and_salts_make_other_contents_of_the_same_tokens(bench: Bench) -> None:
    """Five kinds of requests, two of each, over one prompt of 48 tokens: the second of a kind
    finds 32, and no kind finds another's."""
    from vllm.lora.request import LoRARequest

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "german": {"lora_request": LoRARequest("german", 1, "adapter")},
        "french": {"lora_request": LoRARequest("french", 2, "adapter")},
        "acme": {"cache_salt": "salt of acme"},
        "other": {"cache_salt": "salt of other"},
    }
    engine = bench.engine(50)
    prompt = tokens(1, 48)
    for number in (1, 2):
        for kind, fields in kinds.items():
            engine.run(bench.request(f"{kind}{number}", prompt, 1, **fields))
    tables = engine.end()

    assert tables.lookups() == [
        *((f"{kind}1", 48, 0, "first", 1, 1) for kind in kinds),
        *((f"{kind}2", 48, 32, "first", 1, 1) for kind in kinds),
    ]
    rows = tables.requests()
    for ids in ("hash_ids", "prefix_ids"):
        assert all(rows[f"{kind}1"][ids] == rows[f"{kind}2"][ids] for kind in kinds)
        different = {value for kind in kinds for value in rows[f"{kind}1"][ids]}
        assert len(different) == 5 * 3
    assert [rows[f"{kind}1"]["lora"] for kind in kinds] == [None, "german", "french", None, None]
    tenants = [rows[f"{kind}1"]["tenant"] for kind in kinds]
    assert tenants[:3] == [None, None, None]
    assert len(set(tenants)) == 3
    assert tenants == [rows[f"{kind}2"]["tenant"] for kind in kinds]
    # A salt is a secret, and is written nowhere.
    assert not any(b"salt of" in path.read_bytes() for path in tables.folder.iterdir())


def test_prefix_ids_are_equal_as_far_as_prompts_are(bench: Bench) -> None:
    """Two prompts share 40 tokens: their prefixes of 16 and 32 tokens are the same, that of 48
    and all that follow are not. Content ids would show so only where a block is that short."""
    engine = bench.engine(400)
    shared = tokens(1, 40)
    prompts = {
        "one": shared + tokens(2, 70),
        "two": shared + tokens(3, 70),
        "short": shared[:15],
        "long": tokens(4, 5000),
        "longer": tokens(4, 5000) + tokens(5, 100),
    }
    for name, prompt in prompts.items():
        engine.run(bench.request(name, prompt, 1))
    tables = engine.end()

    ids = {name: row["prefix_ids"] for name, row in tables.requests().items()}
    one, two = ids["one"], ids["two"]
    assert len(one) == len(two) == 110 // 16
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert ids["short"] == []
    # 16, 32 … 1,024 are 64 lengths; then 2,048 and 4,096.
    assert ids["long"] == ids["longer"]
    assert len(set(ids["long"])) == 66
    assert tables.metadata["prefix_lengths"][:66] == prefix_lengths(5000)


def test_a_streaming_session_has_one_row_at_its_end(bench: Bench) -> None:
    """The client sends 32 tokens, gets three, sends 20 more, gets three, and closes.

    After the first part 34 tokens are computed, in three blocks; the third answer token is
    dropped, as vLLM does, so the second part makes a prompt of 34 + 20 = 54 tokens, of which 20
    are computed now, without a lookup. In the end 56 tokens are computed, in four blocks.
    """
    engine = bench.engine(20)
    prompt = tokens(1, 32)
    engine.add(bench.request("talk", list(prompt), 3, resumable=True))
    engine.step(3)
    engine.step(5)
    engine.add(bench.request("talk", tokens(2, 20), 3, resumable=True))
    engine.step(3)
    engine.add(bench.request("talk", [3], 1, resumable=False))
    engine.run(bench.request("next", list(prompt), 1))
    tables = engine.end()

    assert tables.lookups() == [
        ("talk", 32, 0, "first", 1, 1),
        ("next", 32, 16, "first", 1, 1),
    ]
    assert tables.steps("prefill_tokens", "decode_tokens", "waiting_reqs", "repeats")[:7] == [
        (32, 0, 0, 1),
        (0, 1, 0, 1),
        (0, 1, 0, 1),
        (0, 0, 1, 5),
        (20, 0, 0, 1),
        (0, 1, 0, 1),
        (0, 1, 0, 1),
    ]
    rows = tables.requests()
    talk = rows["talk"]
    assert (talk["input_length"], talk["output_length"], talk["computed_tokens"]) == (54, 3, 56)
    assert (talk["num_blocks"], talk["finish_reason"]) == (4, "abort")
    assert talk["hash_ids"][:2] == rows["next"]["hash_ids"]
    assert (len(talk["hash_ids"]), len(talk["output_hash_ids"])) == (4, 0)
    # Blocks are held while the engine waits for the client.
    assert (15.0, 3, 0, 17, 0, 1) in tables.usage()
