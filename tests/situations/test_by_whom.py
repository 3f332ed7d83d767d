# SPDX-License-Identifier: Apache-2.0
"""By whom: tenants, adapters, priorities, API servers and calls, on vLLM's scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import analysis
from analysis.judgement import measures
from analysis.renderers.text import by_whom as text
from analysis.renderers.text import summary as whole
from analysis.requests.by_whom import Share, Split
from analysis.summary import Summary
from profilemate.hooks.kv import drafts
from tests.situations.bench import Bench, Engine
from tests.situations.test_engines import ngram, speculate
from tests.support.scheduler import tokens

SYSTEM = tokens(1, 256)


def summary_of(engine: Engine, labels: Path | None = None) -> Summary:
    return analysis.summarize(analysis.open_session(engine.end().folder, label_rules=labels))


def split(found: Summary, by: str) -> Split:
    known = found.by_whom.split(by)
    assert known is not None
    return known


def shares(found: Summary, by: str) -> dict[str | None, Share]:
    return {share.key: share for share in split(found, by).shares}


def six_salts(bench: Bench) -> Engine:
    """Two requests of each of six tenants, one after the other, with one system prompt."""
    engine = bench.engine(500)
    for number in range(12):
        prompt = [*SYSTEM, *tokens(100 + number, 40)]
        salt = f"salt of tenant {number % 6}"
        engine.run(bench.request(f"request {number}", prompt, 2, cache_salt=salt))
    return engine


def test_a_system_prompt_under_six_salts_is_new_to_five_of_them_alone(bench: Bench) -> None:
    """Prompts of 296 tokens: 18 full blocks, 16 of them the system prompt. The first request of
    each salt computes 18, the second finds 16 and computes 2. Five system prompts, 1,280 tokens,
    had come before under another salt."""
    found = summary_of(six_salts(bench))
    by_salt = shares(found, "salt")

    assert found.by_whom.known_elsewhere_tokens == 1280
    assert found.misses.by_reason["compulsory"].tokens == 6 * (18 + 2) * 16
    assert sorted(share.known_elsewhere_tokens or 0 for share in by_salt.values()) == [
        0,
        *[256] * 5,
    ]
    assert {
        (share.requests, share.query_tokens, share.hit_tokens, share.missed_by_reason["compulsory"])
        for share in by_salt.values()
    } == {(2, 592, 256, 320)}
    said = whole.render(found)
    assert "1,280 prompt tokens" in said
    assert said.count("592   43.24 %") == 6


def test_a_salt_is_its_number_and_nowhere_itself(bench: Bench) -> None:
    engine = six_salts(bench)
    tables = engine.end()
    found = analysis.summarize(analysis.open_session(tables.folder))
    numbers = {str(row["tenant"]) for row in tables.requests().values()}
    assert {share.key for share in split(found, "salt").shares} == numbers
    files = [path.read_bytes() for path in tables.folder.rglob("*") if path.is_file()]
    assert not any(b"salt of" in content for content in files)


def test_bare_ids_are_those_of_the_same_tokens_without_salt_and_adapter(bench: Bench) -> None:
    from vllm.lora.request import LoRARequest

    engine = bench.engine(100)
    prompt = tokens(1, 48)
    engine.run(bench.request("plain", prompt, 2))
    engine.run(bench.request("salted", prompt, 2, cache_salt="acme"))
    german = LoRARequest("german", 1, "adapter")
    engine.run(bench.request("german", prompt, 2, lora_request=german))
    engine.run(bench.request("short", prompt[:15], 2, cache_salt="acme"))
    rows = engine.end().requests()

    plain = rows["plain"]["hash_ids"]
    assert len(plain) == 3
    assert rows["plain"]["bare_hash_ids"] == rows["short"]["bare_hash_ids"] == []
    assert rows["salted"]["bare_hash_ids"] == rows["german"]["bare_hash_ids"] == plain
    assert not {*plain} & {*rows["salted"]["hash_ids"], *rows["german"]["hash_ids"]}


def test_what_came_without_a_salt_is_new_to_the_salt_alone_and_the_other_way_round(
    bench: Bench,
) -> None:
    """Three blocks of 16 each time; the last request's prompt begins otherwise."""
    engine = bench.engine(100)
    prompt = tokens(1, 50)
    engine.run(bench.request("plain", prompt, 2))
    engine.run(bench.request("salted", prompt, 2, cache_salt="acme"))
    engine.run(bench.request("salted first", [5, *prompt[1:]], 2, cache_salt="acme"))
    engine.run(bench.request("plain second", [5, *prompt[1:]], 2))
    by_salt = shares(summary_of(engine), "salt")
    salted = next(share for key, share in by_salt.items() if key is not None)
    assert (salted.known_elsewhere_tokens, salted.missed_by_reason) == (48, {"compulsory": 96})
    assert by_salt[None].known_elsewhere_tokens == 48


def test_an_evicted_block_is_not_new_to_its_salt(bench: Bench) -> None:
    """The salt had it, lost it, and computes it again: capacity, whoever else had the tokens."""
    engine = bench.engine(5)
    prompt = tokens(1, 40)
    engine.run(bench.request("plain", prompt, 2))
    engine.run(bench.request("salted", prompt, 2, cache_salt="acme"))
    engine.run(bench.request("other", tokens(2, 64), 2))
    engine.run(bench.request("salted again", prompt, 2, cache_salt="acme"))
    by_salt = shares(summary_of(engine), "salt")
    salted = next(share for key, share in by_salt.items() if key is not None)
    assert salted.missed_by_reason == {"compulsory": 32, "capacity": 32}
    assert salted.known_elsewhere_tokens == 32
    assert by_salt[None].recomputed_for_it_tokens == by_salt[None].of_others_tokens == 32


def test_what_its_own_salt_never_finished_is_new_to_all(bench: Bench) -> None:
    """The first request is aborted after 64 of its 136 tokens: four of eight full blocks."""
    engine = bench.engine(20, max_num_batched_tokens=64)
    prompt = tokens(1, 136)
    engine.add(bench.request("gone", prompt, 2, cache_salt="acme"))
    engine.step()
    engine.abort("gone")
    engine.run(bench.request("again", prompt, 2, cache_salt="acme"))
    found = summary_of(engine)
    (share,) = split(found, "salt").shares
    assert share.missed_by_reason == {"compulsory": (8 + 4) * 16}
    assert share.known_elsewhere_tokens == 0


def test_an_adapter_evicts_another_ones_content(bench: Bench) -> None:
    """A pool of 8 blocks. german has 3 full blocks cached, and french needs all 8: german's next
    request computes its prompt again. Each pays for that with evictions of its own."""
    from vllm.lora.request import LoRARequest

    engine = bench.engine(8)
    german, french = (LoRARequest(name, n, "a") for n, name in enumerate(("german", "french"), 1))
    prompt = tokens(1, 52)
    engine.run(bench.request("first", prompt, 2, lora_request=german))
    engine.run(bench.request("large", tokens(2, 120), 2, lora_request=french))
    engine.run(bench.request("second", prompt, 2, lora_request=german))
    engine.run(bench.request("third", prompt, 2, lora_request=german))
    found = summary_of(engine)
    by_lora = shares(found, "lora")

    mine, theirs = by_lora["german"], by_lora["french"]
    assert (mine.requests, mine.query_tokens, mine.hit_tokens) == (3, 156, 48)
    assert mine.missed_by_reason == {"compulsory": 48, "capacity": 48}
    assert (theirs.requests, theirs.hit_rate, theirs.missed_by_reason) == (
        1,
        0,
        {"compulsory": 112},
    )
    assert (theirs.recomputed_for_it_tokens, theirs.of_others_tokens) == (48, 48)
    assert (mine.recomputed_for_it_tokens, mine.of_others_tokens) == (0, 0)
    assert (theirs.evicted_blocks, mine.lost_blocks) == (3, 3)
    assert mine.evicted_blocks == theirs.lost_blocks == found.evictions.total.blocks - 3


def test_who_evicts_is_not_who_loses(bench: Bench) -> None:
    engine = bench.engine(5)
    engine.run(bench.request("loses", tokens(1, 40), 2, priority=1))
    engine.run(bench.request("evicts", tokens(2, 70), 2, priority=2))
    by_priority = shares(summary_of(engine), "priority")
    assert (by_priority["1"].evicted_blocks, by_priority["1"].lost_blocks) == (0, 2)
    assert (by_priority["2"].evicted_blocks, by_priority["2"].lost_blocks) == (2, 0)


def test_who_is_preempted_by_priority(bench: Bench) -> None:
    """Priorities, and a pool that holds one of two: the less urgent one gives its blocks up."""
    engine = bench.engine(9, scheduling_policy="priority")
    engine.add(bench.request("batch", tokens(1, 64), 40, priority=5))
    engine.step(2)
    engine.run(bench.request("chat", tokens(2, 64), 40, priority=1))
    tables = engine.end()
    found = analysis.summarize(analysis.open_session(tables.folder))
    by_priority = shares(found, "priority")

    assert found.facts.scheduler.policy == "priority"
    times = tables.requests()["batch"]["preemptions"]
    assert times == found.preemptions.count > 0
    assert (by_priority["5"].preempted, by_priority["1"].preempted) == (times, 0)
    assert (by_priority["5"].preempted_others, by_priority["1"].preempted_others) == (0, times)
    assert by_priority["1"].queued_p95_sec == tables.requests()["chat"]["queue_sec"]
    said = whole.render(found)
    assert re.search(r"Policy +priority  a lower number goes first", said)
    assert "By priority" in said


def test_preemptions_of_what_has_not_ended_are_not_known(bench: Bench) -> None:
    engine = bench.engine(9, scheduling_policy="priority")
    engine.add(bench.request("batch", tokens(1, 64), 40, priority=5))
    engine.step(2)
    engine.add(bench.request("chat", tokens(2, 64), 40, priority=1))
    engine.step(20)
    found = summary_of(engine)
    by_priority = split(found, "priority")
    assert (by_priority.shares, found.requests.ended) == ((), 0)
    assert by_priority.not_known is not None
    assert by_priority.not_known.preempted == found.preemptions.count > 0


def test_who_makes_room_for_itself_preempts_no_other(bench: Bench) -> None:
    """Alone in a pool that its second chunk does not fit into, it preempts itself until the other
    one's end makes room for it."""
    engine = bench.engine(12, max_num_batched_tokens=64, scheduler_reserve_full_isl=False)
    engine.add(bench.request("first", tokens(1, 60), 40), bench.request("long", tokens(2, 150), 2))
    for _ in range(60):
        engine.step()
    found = summary_of(engine)
    (share,) = split(found, "salt").shares
    assert found.preemptions.by_itself > 0
    assert share.preempted_others == found.preemptions.resumed - found.preemptions.by_itself


def test_a_call_for_four_answers_is_one_call(bench: Bench) -> None:
    """The ids are those of vLLM's own parent request."""
    from vllm.sampling_params import SamplingParams

    engine = bench.engine(100)
    children = parents_ids("chatcmpl-7", SamplingParams(n=4))
    prompt = tokens(1, 40)
    for child in children:
        engine.add(bench.request(child, prompt, 2))
    engine.run(bench.request("0_alone", tokens(2, 40), 2), bench.request("other", tokens(3, 9), 2))
    found = summary_of(engine)
    fan_out = found.by_whom.fan_out
    assert (fan_out.calls, fan_out.requests, fan_out.most) == (1, 4, 4)
    assert found.requests.ended == 6
    assert re.search(
        r"Several answers +1 call  of 4 requests, at most 4 of one", whole.render(found)
    )


def parents_ids(call: str, params: object) -> list[str]:
    """The request ids with which vLLM asks for each answer of a call."""
    from types import SimpleNamespace

    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = SimpleNamespace(
        request_id=call, external_req_id=call, params=params, sampling_params=params
    )
    parent = ParentRequest(request)  # type: ignore[arg-type]
    return [parent.get_child_info(index)[0] for index in range(4)]


def test_labels_are_the_users_names_for_request_ids(bench: Bench, tmp_path: Path) -> None:
    """The first rule counts. The third id has none."""
    rules = tmp_path / "rules"
    rules.write_text("# who\n\nchat = ^chatcmpl\nrest = ^(chat|cmpl)\n")
    engine = bench.engine(100)
    for request_id in ("chatcmpl-1", "cmpl-2", "batch-3"):
        engine.run(bench.request(request_id, tokens(len(request_id), 40), 2))
    found = summary_of(engine, rules)
    assert {key: share.requests for key, share in shares(found, "label").items()} == {
        "chat": 1,
        "rest": 1,
        None: 1,
    }
    assert "no label" in text.render(found, split(found, "label"))


def test_each_api_server_is_named(bench: Bench) -> None:
    engine = bench.engine(100)
    for server in (0, 1, 1):
        engine.run(bench.request(f"of {server}", tokens(server, 40), 2, client_index=server))
    by_server = shares(summary_of(engine), "api-server")
    assert {key: share.requests for key, share in by_server.items()} == {"0": 1, "1": 2}


def test_a_request_that_has_not_ended_is_not_known(bench: Bench) -> None:
    """Its engine is."""
    engine = bench.engine(100)
    engine.run(bench.request("ended", tokens(1, 40), 2, cache_salt="acme"))
    engine.add(bench.request("runs", tokens(2, 70), 20, cache_salt="acme"))
    engine.step(3)
    found = summary_of(engine)
    by_salt = split(found, "salt")
    (known,) = by_salt.shares
    assert (known.requests, known.query_tokens) == (1, 40)
    assert by_salt.not_known is not None
    assert (by_salt.not_known.requests, by_salt.not_known.query_tokens) == (1, 70)
    assert by_salt.not_known.missed_by_reason == {"unknown": 70}
    assert split(found, "engine").not_known is None
    assert "not known" in text.render(found, by_salt)


def test_drafts_are_counted_as_vllm_counts_them(bench: Bench) -> None:
    """In three steps of ``first`` (test_engines.py): 3 drafts of which 1 is accepted, 3 of which 3
    are. ``padded`` has three drafts that only fill its step up, and none is accepted."""
    engine = bench.engine(40, speculative_config=ngram(3))
    counted = vllms_drafts(engine)
    engine.add(bench.request("first", tokens(1, 28), 7, priority=1))
    for accepted in (0, 1, 3):
        speculate(engine, "first", accepted)
    prompt = tokens(2, 49)
    engine.run(bench.request("whole", prompt, 1))
    engine.run(bench.request("padded", prompt, 1))
    engine.add(bench.request("gone", tokens(3, 40), 9))
    speculate(engine, "gone", 0)
    engine.abort("gone")
    tables = engine.end()

    rows = tables.requests()
    said = {name: (row["draft_tokens"], row["accepted_tokens"]) for name, row in rows.items()}
    assert said == {"first": (6, 4), "whole": (0, 0), "padded": (3, 0), "gone": (0, 0)}
    assert counted == [9, 4]
    found = analysis.summarize(analysis.open_session(tables.folder))
    assert (found.requests.draft_tokens, found.requests.accepted_tokens) == (9, 4)
    by_priority = shares(found, "priority")
    assert (by_priority["1"].draft_tokens, by_priority["1"].accepted_tokens) == (6, 4)
    assert (by_priority["0"].draft_tokens, by_priority["0"].accepted_tokens) == (3, 0)
    assert measures.by_name("draft_acceptance{priority=1}").of(found) == pytest.approx(4 / 6)
    assert re.search(r"Drafts accepted +4 \(44.44 %\)  of 9 tokens", whole.render(found))


def vllms_drafts(engine: Engine) -> list[int]:
    """Drafts, and accepted ones, as vLLM counts them for its metrics from now on."""
    counted = [0, 0]
    count = engine.scheduler.make_spec_decoding_stats

    def counting(*arguments: Any, **named: Any) -> Any:
        counted[0] += named["num_draft_tokens"]
        counted[1] += named["num_accepted_tokens"]
        return count(*arguments, **named)

    engine.scheduler.make_spec_decoding_stats = counting
    return counted


def test_without_speculation_there_are_no_drafts(bench: Bench) -> None:
    engine = bench.engine(20)
    engine.run(bench.request("r", tokens(1, 28), 2))
    tables = engine.end()
    row = tables.requests()["r"]
    assert (row["draft_tokens"], row["accepted_tokens"]) == (None, None)
    found = analysis.summarize(analysis.open_session(tables.folder))
    assert found.requests.acceptance is None
    assert "Drafts" not in whole.render(found)


def test_a_release_that_tells_drafts_in_another_way_loses_them_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise AttributeError("no scheduled_spec_decode_tokens")

    monkeypatch.setattr(drafts, "_count", fails)
    engine = bench.engine(20, speculative_config=ngram(3))
    engine.run(bench.request("r", tokens(1, 28), 4))
    tables = engine.end()
    row = tables.requests()["r"]
    assert (row["draft_tokens"], row["accepted_tokens"]) == (None, None)
    assert (row["output_length"], row["num_blocks"]) == (4, 2)
    assert tables.metadata["complete"] is True


def everything(bench: Bench) -> Engine:
    """A small pool, all kinds of keys, shared beginnings, preemptions, and one that runs on."""
    from vllm.lora.request import LoRARequest

    engine = bench.engine(24, scheduling_policy="priority")
    for number in range(30):
        prompt = [*SYSTEM[: 16 * (number % 5)], *tokens(number % 7, 30 + number)]
        fields = {
            "cache_salt": (None, "acme", "other")[number % 3],
            "lora_request": LoRARequest("german", 1, "a") if number % 4 == 1 else None,
            "priority": number % 2,
            "client_index": number % 2,
        }
        engine.add(bench.request(f"{'ab'[number % 2]}-{number}", prompt, 20 + number % 3, **fields))
        engine.step(4)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    engine.add(bench.request("runs", tokens(99, 60), 50, cache_salt="acme"))
    engine.step(3)
    return engine


KEYS = ("salt", "lora", "priority", "api-server", "engine", "label")


def test_the_sums_over_all_keys_are_the_sessions_figures(bench: Bench, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("a = ^a-\nb = ^b-.*5\n")
    found = summary_of(everything(bench), rules)
    assert found.preemptions.count > 0
    assert found.misses.recomputed_tokens > 0
    assert {split.by for split in found.by_whom.splits} == {*KEYS}
    # There is one engine, so no other one pays for its evictions.
    assert [share.of_others_tokens for share in split(found, "engine").shares] == [0]
    assert any(share.of_others_tokens for share in split(found, "salt").shares)
    for each in found.by_whom.splits:
        parts = [*each.shares, *filter(None, [each.rest, each.not_known])]
        check_sums(found, parts)


def check_sums(found: Summary, parts: Iterable[Share]) -> None:
    parts = list(parts)

    def total(read: Callable[[Share], float]) -> float:
        return sum(map(read, parts))

    missed, rent = found.misses, found.rent
    assert total(lambda share: share.requests) == missed.requests
    assert total(lambda share: share.query_tokens) == missed.query_tokens
    assert total(lambda share: share.hit_tokens) == missed.hit_tokens
    for reason, part in missed.by_reason.items():
        assert total(lambda share, r=reason: share.missed_by_reason.get(r, 0)) == part.tokens  # type: ignore[misc]
    assert total(lambda share: share.known_elsewhere_tokens or 0) == (
        found.by_whom.known_elsewhere_tokens
    )
    assert total(lambda share: share.evicted_blocks) == found.evictions.total.blocks
    assert total(lambda share: share.lost_blocks) == found.evictions.total.blocks
    assert total(lambda share: share.recomputed_for_it_tokens) == missed.recomputed_tokens
    assert total(lambda share: share.held) == pytest.approx(
        rent.waiting + rent.decoding + rent.running
    )
    assert total(lambda share: share.kept) == pytest.approx(rent.kept_until_evicted)
    assert total(lambda share: share.preempted) == found.preemptions.count
    assert total(lambda share: share.ended) == found.requests.ended
    assert total(lambda share: share.output_tokens) == found.requests.output_tokens
    assert total(lambda share: share.draft_tokens) == (found.requests.draft_tokens or 0)
