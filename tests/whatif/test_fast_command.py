# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif --fast`` as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from analysis.whatif import fast
from analysis.whatif.ceiling import Ceiling
from analysis.whatif.curve import Curve, Point, Verdict
from analysis.whatif.pools import Pool
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "whatif.md"


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """Ten prompts of 3 full blocks, all alike, on an engine with 101 blocks, one of them null."""
    built = SessionBuilder(tmp_path / "session")
    for number in range(10):
        row = {"timestamp": number, "input_length": 50, "output_length": 1, "block_size": 16}
        built.requests({**row, "hash_ids": [1, 2, 3, 100 + number]})
    return built.folder


def test_json(session: Path) -> None:
    answer = invoke(
        "whatif", session, "--fast", "--json", "--blocks=2,0.5x", "--eviction=lru,sieve"
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    # As vLLM counts: 2 blocks are one and the null block, 0.5x of 101 are 50 with it.
    assert [point["pool"]["num_blocks"] for point in found["points"]] == [1, 49]
    policies = [outcome["policy"] for outcome in found["points"][0]["outcomes"]]
    assert policies == ["lru", "sieve"]
    lru = [point["outcomes"][0]["hit_tokens"] for point in found["points"]]
    assert lru == [9 * 16, 9 * 48]


def test_text(session: Path) -> None:
    answer = invoke("whatif", session, "--fast")
    assert answer.returncode == 0, answer.stderr
    words = " ".join(answer.stdout.split())
    assert "Nothing more is to be gained beyond 3 blocks under LRU" in words
    assert "lru fifo lfu arc s3-fifo sieve belady" in words


def test_other_block_size(session: Path) -> None:
    answer = invoke("whatif", session, "--fast", "--json", "--block-size=32", "--eviction=lru")
    found = json.loads(answer.stdout)
    assert found["block_size"] == 32
    # One block of 32 of the 50 tokens.
    assert found["ceiling"]["across_tokens"] == 9 * 32


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fast", "--max-num-seqs=4"], "--max-num-seqs: --fast models the cache alone"),
        (["--fast", "--step-ms=4"], "--step-ms: --fast models the cache alone"),
        (["--fast", "--jobs=0"], "--jobs: --fast models the cache alone"),
        (
            ["--fast", "--scheduling-policy=fcfs"],
            "--scheduling-policy: --fast models the cache alone; leave out --fast or",
        ),
        (["--fast", "--eviction=mru"], "--eviction: 'mru' is none of lru, fifo"),
        (["--fast", "--blocks=1"], "--blocks: '1' is no size of a pool"),
        (["--fast", "--block-size=8,16"], "--block-size: --fast takes one size; give one"),
        (["--eviction=lru"], "--eviction: vLLM's own code has one eviction rule; add --fast"),
    ],
)
def test_wrong_options(session: Path, options: list[str], said: str) -> None:
    answer = invoke("whatif", session, *options)
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert said in line


def test_a_trace_has_no_pool_to_take_a_factor_of(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1,2]}\n')
    answer = invoke("whatif", trace, "--fast", "--blocks=2x")
    assert answer.returncode == 2
    assert "give a number of blocks" in answer.stderr
    for option in ("--after=1s", "--requests-after=1"):
        answer = invoke("whatif", trace, "--fast", option)
        assert (answer.returncode, answer.stdout) == (2, "")
        assert "it has 1 requests in 0 s, and all of them are to be left out" in answer.stderr
    assert invoke("whatif", trace, "--fast", "--blocks=9").returncode == 0


@pytest.mark.parametrize(
    "option", ["--after=1.5s", "--requests-after=2", "--last-half"], ids=lambda text: text[2:6]
)
def test_a_warm_cache_of_a_trace(tmp_path: Path, option: str) -> None:
    """The second half finds what the first half left behind, which a cut file would not have."""
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 33, "output_length": 1, "block_size": 16, "hash_ids": [1, 2, 3]}
    rows = [{**row, "timestamp": 1_700_000_000_000 + 1000 * number} for number in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = invoke("whatif", trace, "--fast", "--json", "--blocks=9", "--eviction=lru", option)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    (outcome,) = found["points"][0]["outcomes"]
    assert (outcome["requests"], outcome["query_tokens"], outcome["hit_tokens"]) == (2, 66, 64)
    assert (found["ceiling"]["requests"], found["warm_up"]) == (2, 2)
    shown = invoke("whatif", trace, "--fast", "--blocks=9", "--eviction=lru", option).stdout
    assert "2 requests after 2 of warm-up with" in " ".join(shown.split())


def test_a_warm_cache_of_a_session(session: Path) -> None:
    answer = invoke("whatif", session, "--fast", "--json", "--eviction=lru", "--last-half")
    found = json.loads(answer.stdout)
    assert (found["ceiling"]["requests"], found["warm_up"]) == (5, 5)
    assert found["ceiling"]["hit_rate"] == 48 / 50


def test_a_trace_without_a_full_block(tmp_path: Path) -> None:
    """Nothing can be found, which is not the same as not knowing."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp":0,"input_length":100,"output_length":1,"hash_ids":[]}\n')
    answer = invoke("whatif", trace, "--fast")
    assert answer.returncode == 0, answer.stderr
    assert "no request has a full block in common" in " ".join(answer.stdout.split())


def test_every_key_is_documented() -> None:
    section = DOCS.read_text().split("### JSON of the fast engine")[1]
    keys = set(re.findall(r"`([a-z0-9_]+)`", section))
    for kind in (Curve, Ceiling, Point, Pool, Verdict):
        for field in dataclasses.fields(kind):
            assert field.name in keys, f"{kind.__name__}.{field.name}"


def test_every_rule_is_documented() -> None:
    section = DOCS.read_text().split("## The fast engine")[1]
    for rule in fast.POLICIES:
        assert f"`{rule}`" in section
