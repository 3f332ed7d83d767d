# SPDX-License-Identifier: Apache-2.0
"""What the fast engine says of a session, worked out by hand, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from analysis import series, summarize
from analysis.errors import SessionError
from analysis.renderers import json as as_json
from analysis.renderers.html import page
from analysis.renderers.text import miss_ratio_curve as text
from analysis.series import miss_ratio_curve
from analysis.tables.session import open_session
from analysis.whatif import fast
from analysis.whatif.curve import Curve, Verdict
from analysis.whatif.workload import of_session, read_workload
from analysis.wording.miss_ratio_curve import sentences
from tests.analysis.builder import SessionBuilder

GIB = 2**30
ROUNDS = 5


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    """Three prompts of 4 full blocks of 16 tokens and a bit, in turn, five times each, on an engine
    with 10 usable blocks. A block takes 1 GiB."""
    built = SessionBuilder(tmp_path / "session")
    built.metadata(
        cache={"block_size": [16], "blocks": 11, "prefix_caching": True},
        groups=[{"kind": "FullAttentionSpec", "block_size": 16, "bytes_per_block": GIB}],
        memory={
            "total_bytes": 40 * GIB,
            "requested_bytes": 30 * GIB,
            "weights_bytes": 16 * GIB,
            "kv_bytes": 11 * GIB,
        },
    )
    for turn in range(3 * ROUNDS):
        own = 10 * (1 + turn % 3)
        built.requests(
            {
                "timestamp": 1000 * turn,
                "input_length": 70,
                "output_length": 1,
                "hash_ids": [own + 1, own + 2, own + 3, own + 4, 1000 + turn],
                "block_size": 16,
                "queue_sec": 0,
                "finish_sec": turn + 0.5,
            }
        )
        built.lookups(
            {
                "timestamp_sec": turn,
                "request_id": f"{turn}",
                "query_tokens": 70,
                "hit_tokens": 32 if turn > 2 else 0,
            }
        )
    return built


def curve(built: SessionBuilder, *sizes: int, **more: Any) -> Curve:
    return fast.curve(read_workload(built.folder), sizes or None, **more)


def test_sizes_by_hand(session: SessionBuilder) -> None:
    found = curve(session, 2, 10, 12)
    # After the first three, each of the other 12 asks for four blocks. Under LRU the eight of the
    # two prompts since lie above them, so what a pool has beyond eight is found each time. At best
    # it keeps two blocks of one prompt, or two prompts and two blocks of the third.
    expected = {"lru": (0, 12 * 2, 48), "belady": (4 * 2, 4 * 10, 48)}
    for policy, hits in expected.items():
        outcomes = [point.outcome(policy) for point in found.points]
        assert [outcome and outcome.hit_tokens for outcome in outcomes] == [
            16 * blocks for blocks in hits
        ], policy
    assert found.enough_blocks == 12
    # 99 % of 48 blocks is more than 47.
    assert found.nearly_blocks == 12
    assert found.references == 12 * ROUNDS
    assert found.ceiling.query_tokens == 1050
    assert found.ceiling.across_tokens == 16 * 48
    assert found.ceiling.conversations == 15
    assert found.ceiling.distinct_blocks == 12


def test_evictions_by_hand(session: SessionBuilder) -> None:
    found = curve(session, 2, 10, 12, policies=["lru"])
    # Of 60 blocks those that were not found were allocated; the last ones are still there.
    expected = [60 - 0 - 2, 60 - 24 - 10, 60 - 48 - 12]
    assert [point.outcomes[0].evictions for point in found.points] == expected
    # 70 tokens take 5 blocks.
    assert [point.outcomes[0].failed_requests for point in found.points] == [15, 0, 0]


def test_warm_up_is_left_out_but_fills_the_pool(session: SessionBuilder) -> None:
    workload = of_session(open_session(session.folder, after_sec=5.5))
    found = fast.curve(workload, [12], ["lru"])
    (outcome,) = found.points[0].outcomes
    assert (outcome.requests, outcome.query_tokens, outcome.hit_tokens) == (9, 630, 16 * 36)
    assert outcome.evictions == 0
    assert found.ceiling.hit_rate == 16 * 36 / 630


def test_what_holds_the_hit_rate_back(session: SessionBuilder) -> None:
    found = curve(session, 2, 10, 12)
    verdicts = [point.verdict for point in found.points]
    assert [verdict and verdict.by for verdict in verdicts] == ["capacity", "policy", "workload"]
    assert found.at_measured == found.points[1]
    assert verdicts[1] is not None
    assert verdicts[1].lost_to_capacity == pytest.approx(16 * (48 - 40) / 1050)
    assert verdicts[1].lost_to_policy == pytest.approx(16 * (40 - 24) / 1050)


def test_the_best_rule_is_named(session: SessionBuilder) -> None:
    (point,) = curve(session, 10).points
    rates = {outcome.policy: outcome.hit_rate or 0 for outcome in point.outcomes}
    assert tuple(rates) == fast.POLICIES
    bound = rates.pop("belady")
    assert point.verdict is not None
    assert point.verdict.best_hit_rate == rates[point.verdict.best_policy] == max(rates.values())
    assert bound >= max(rates.values())


def test_words(session: SessionBuilder) -> None:
    said = " ".join(sentences(curve(session, 10)))
    assert "The eviction policy holds the hit rate back: with 10 blocks it is 36.57 %" in said
    assert "no pool finds more than 73.14 % (modelled)" in said
    assert "Nothing more is to be gained beyond 12 blocks under LRU; 12 give 99 % of it" in said
    assert "own hit rate was 36.57 % (measured): the model is 0.00 points" in said


def test_words_of_what_to_do(session: SessionBuilder) -> None:
    """A rule cannot be chosen, a size can."""
    said = " ".join(sentences(curve(session, 10, 11, 30)))
    # Of the rules, S3-FIFO finds most with 10 blocks, 50.29 %.
    assert "but a larger pool finds as much: 11 blocks find 54.86 % under LRU." in said
    assert "vLLM has no flag for another rule." in " ".join(sentences(curve(session, 10)))


def test_a_pool_is_not_larger_than_itself(session: SessionBuilder) -> None:
    """Without a better rule that can be had, the bound is what a larger pool is to find."""
    rules = ["lru", "belady"]
    said = " ".join(sentences(curve(session, 10, policies=rules)))
    assert "would make it 60.95 %" in said
    assert "finds as much" not in said
    assert said.count("vLLM has no flag for another rule.") == 1
    said = " ".join(sentences(curve(session, 4, 10, 11, 12, policies=rules)))
    assert "a larger pool finds as much as that bound: 12 blocks find 73.14 % under LRU." in said


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (Verdict("capacity", 0.5, 0.01, "arc", 0.2), "Capacity holds the hit rate back"),
        (Verdict("workload", 0.0, 0.0, "lru", 0.2), "Nothing holds the hit rate back"),
    ],
)
def test_words_of_other_verdicts(session: SessionBuilder, verdict: Verdict, said: str) -> None:
    found = curve(session, 10)
    assert found.at_measured is not None
    point = dataclasses.replace(found.at_measured, verdict=verdict)
    assert said in next(iter(sentences(dataclasses.replace(found, at_measured=point))))


def test_what_pools_take(session: SessionBuilder) -> None:
    by_size = {point.pool.num_blocks: point.pool for point in curve(session, 10, 18, 30).points}
    # 19 of the 40 GiB are not for the KV cache; the null block takes one GiB, too.
    assert by_size[10].gpu_memory_utilization == pytest.approx(30 / 40)
    assert by_size[18].gpu_memory_utilization == pytest.approx(38 / 40)
    # 50 of 40 GiB: on two GPUs, 3 + (16 + 31) / 2 of the 30 that may be taken.
    assert by_size[30].gpu_memory_utilization is None
    assert [by_size[size].gpus for size in (10, 18, 30)] == [1, 1, 2]
    assert [by_size[size].gib for size in (10, 18, 30)] == [11, 19, 31]
    assert [by_size[size].factor for size in (10, 18, 30)] == [1, 19 / 11, 31 / 11]


def test_default_sizes(session: SessionBuilder) -> None:
    pools = [point.pool for point in curve(session).points]
    # Of 11 blocks, one of which is the null block; so it is of the others.
    assert [pool.num_blocks for pool in pools] == [2, 5, 10, 21, 43, 87, 175]
    assert [pool.factor for pool in pools] == [3 / 11, 6 / 11, 1, 2, 4, 8, 16]


def test_larger_blocks(session: SessionBuilder) -> None:
    found = fast.curve(read_workload(session.folder).resized(32), [4, 6], ["lru"])
    # Two blocks of 32 each; the other prompts' four lie between.
    assert [point.outcomes[0].hit_tokens for point in found.points] == [0, 12 * 64]
    # The session's 10 blocks and its null block are 5.5 of these.
    assert [point.pool.factor for point in found.points] == [5 / 5.5, 7 / 5.5]
    assert [point.pool.gib for point in found.points] == [10, 14]
    assert found.at_measured is None


def test_engines_have_pools_of_their_own(session: SessionBuilder) -> None:
    rows = (session.folder / "requests.jsonl").read_text().splitlines()
    with open(session.folder / "requests.jsonl", "a") as file:
        file.writelines(json.dumps({**json.loads(row), "engine": 1}) + "\n" for row in rows)
    found = curve(session, 10, policies=["lru"])
    (outcome,) = found.points[0].outcomes
    assert found.engines == 2
    assert (outcome.requests, outcome.hit_tokens) == (30, 2 * 16 * 24)


def test_without_contents(tmp_path: Path) -> None:
    built = SessionBuilder(tmp_path / "session")
    built.requests({"input_length": 40, "output_length": 2, "block_size": 16})
    with pytest.raises(SessionError, match="prefix caching was off"):
        curve(built)


def test_the_last_token_is_always_computed(tmp_path: Path) -> None:
    """Of a prompt that is two blocks of 16 tokens to the last token, one can be found."""
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 32, "output_length": 1, "block_size": 16}
    path.write_text(2 * (json.dumps({**row, "hash_ids": [1, 2]}) + "\n"))
    found = fast.curve(read_workload(path), [8])
    assert {outcome.hit_tokens for outcome in found.points[0].outcomes} == {16}
    assert found.ceiling.across_tokens == 16
    assert (found.measured, found.at_measured) == (None, None)
    assert found.enough_blocks == 1


def test_text_is_plain_and_narrow(session: SessionBuilder) -> None:
    lines = text.render(curve(session)).splitlines()
    assert all(len(line) <= 80 and line.isascii() for line in lines)
    shown = "\n".join(lines)
    assert "within conversation 0.00 %  0 tokens" in shown
    assert "across              73.14 %  768 tokens" in shown
    for heading in ("Ceiling (modelled)", "rule (modelled)", "Miss-ratio curve (modelled)"):
        assert heading in shown
    (measured,) = (line for line in lines if line.startswith("  measured"))
    assert measured.split() == ["measured", "36.57", "%", "0"]
    bars = [line for line in lines if line.rstrip().endswith("#")]
    # 100 - 73.14 %, and a bar of 50 characters times that.
    assert bars[-1].split() == ["175", "26.86", "%", "#" * 13]


def test_json(session: SessionBuilder) -> None:
    found = json.loads(as_json.render(curve(session, 10)))
    assert found["curve_version"] == 1
    (point,) = found["points"]
    assert point["outcomes"][0]["says"] == "modelled"
    assert point["outcomes"][0]["hit_rate"] == 384 / 1050
    assert found["measured"]["says"] == "measured"
    assert point["verdict"]["by"] == "policy"


def test_report(session: SessionBuilder) -> None:
    opened = open_session(session.folder)
    summary = summarize(opened)
    drawn = series.measure(opened, summary)
    found = drawn.miss_ratio_curve.curve
    assert found is not None
    assert 10 in [point.pool.num_blocks for point in found.points]
    assert found.points[-1].pool.num_blocks >= found.enough_blocks
    written = page.render(summary, drawn)
    assert "Would a larger pool find more?" in written
    assert "The eviction policy holds the hit rate back: with 10 blocks" in written


def test_report_leaves_out_what_takes_too_long(
    session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miss_ratio_curve, "MOST_BLOCKS", 30)
    opened = open_session(session.folder)
    drawn = series.measure(opened, summarize(opened))
    assert drawn.miss_ratio_curve.curve is None
    assert drawn.miss_ratio_curve.problem == "its requests held more than 30 blocks"
    written = page.render(summarize(opened), drawn)
    assert "left out: its requests held more than 30 blocks." in written


def test_report_without_one_block_size(session: SessionBuilder) -> None:
    session.requests({"input_length": 70, "output_length": 1, "block_size": 32})
    drawn = miss_ratio_curve.measure(open_session(session.folder))
    assert drawn.curve is None
    assert "16 tokens in one line and for 32 in another" in (drawn.problem or "")
