# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif`` with a trace, through vLLM's own scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twelve requests, ten seconds apart, two of them together. Each has 3 blocks that all share
    and 2 of its own, so 5; each third one has 40, of which 37 were never there before."""
    folder = tmp_path_factory.mktemp("trace")
    trace = folder / "trace.jsonl"
    rows = []
    for number in range(12):
        blocks = 40 if number % 3 == 2 else 5
        own = range(100 * number + 10, 100 * number + 10 + blocks - 3)
        rows.append(
            {
                "timestamp": 10_000 * (6 if number == 7 else number),
                "input_length": 16 * blocks,
                "output_length": 1,
                "hash_ids": [1, 2, 3, *own],
                "block_size": 16,
            }
        )
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}

    def simulated(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "profilemate", "whatif", str(trace), "--jobs=1", *options]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return simulated


def found(answered: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert answered.returncode == 0, answered.stderr
    content: dict[str, Any] = json.loads(answered.stdout)
    return content


def test_hit_rates_are_of_the_requests_that_all_configurations_served(run: Run) -> None:
    """The pool of 20 blocks cannot hold four requests. All but the first request find 3 blocks."""
    content = found(run("--blocks=20,60", "--json"))
    assert content["baseline"] is None
    small, large = content["outcomes"]
    assert [one["label"] for one in (small, large)] == ["20 blocks", "60 blocks"]
    compared = {"requests": 8, "query_tokens": 8 * 80, "hit_tokens": 7 * 48}
    for one in (small, large):
        assert {key: one[key] for key in compared} == compared
    assert small["served"] | compared == small["served"]
    assert large["served"]["requests"] == 12
    assert large["served"]["hit_tokens"] == 11 * 48
    assert large["served"]["query_tokens"] == 8 * 80 + 4 * 640
    assert (small["failed_requests"], large["failed_requests"]) == (4, 0)
    assert content["left_out"] == 4


def test_the_text_says_so_and_names_what_was_asked_for(run: Run) -> None:
    answered = run("--blocks=20,60", "--max-num-seqs=4")
    assert answered.returncode == 0, answered.stderr
    lines = [" ".join(line.split()) for line in answered.stdout.splitlines()]
    flowing = " ".join(lines)
    assert "20 blocks, 4 seqs simulated 19 52.50 % 0" in lines
    assert "60 blocks, 4 seqs simulated 59 52.50 % 108" in lines
    assert "vLLM's defaults" not in flowing
    assert "hit rates are of the same 8 requests: of those that every configuration" in flowing
    assert "20 blocks, 4 seqs: 4 requests can never fit into the pool." in lines
    assert "of all 12 that it served, the hit rate is 16.50 %" in flowing


def test_warm_up(run: Run) -> None:
    """The requests that count find what the others left behind. A cut file has a cold cache."""
    content = found(run("--blocks=20,60", "--requests-after=7", "--json"))
    for one in content["outcomes"]:
        assert (one["requests"], one["hit_tokens"]) == (3, 3 * 48)
    # One of those left out came together with the first that counts.
    assert content["warm_up"] == 7
    # Those of the warm-up can never fit, either, and do not count.
    assert content["outcomes"][0]["failed_requests"] == 2
