# SPDX-License-Identifier: Apache-2.0
"""When a snapshot is taken by itself: what is understood, and what is said of the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profilemate import ROOT, config
from profilemate.format.when import (
    EVENTS,
    EXAMPLES,
    MEASURES,
    PERCENT,
    Condition,
    Limit,
    read_when,
)

WHEN, LIMIT, LAST = (
    *("VLLM_PROFILING_SNAPSHOT_WHEN", "VLLM_PROFILING_SNAPSHOT_LIMIT"),
    "VLLM_PROFILING_SNAPSHOT_LAST",
)


def test_nothing_is_taken_by_itself_by_default() -> None:
    read = config.read({})
    assert (read.snapshot_when, read.snapshot_limit) == ((), Limit(5, 600.0))
    assert (read.snapshot_last_sec, read.problems) == (600.0, ())


@pytest.mark.parametrize(
    ("text", "measure", "above", "limit", "seconds"),
    [
        ("preemptions>20/1m", "preemptions", True, 20, 60),
        ("preemptions < 0 / 90 s", "preemptions", False, 0, 90),
        ("usage>98%/30s", "usage", True, 98 * PERCENT, 30),
        ("USAGE<0.5%/1h", "usage", False, PERCENT // 2, 3600),
        ("hit_rate<20.000001%/5m", "hit_rate", False, 20 * PERCENT + 1, 300),
        ("queue_p95>2s/1m", "queue_p95", True, 2_000_000_000, 60),
        ("queue_p95>1.5 ms/1s", "queue_p95", True, 1_500_000, 1),
        ("queue_p95>1m/10m", "queue_p95", True, 60_000_000_000, 600),
    ],
)
def test_a_condition(text: str, measure: str, above: bool, limit: int, seconds: int) -> None:
    shown = re.sub(r"\s", "", text.lower())
    read = config.read({WHEN: f" {text} "})
    assert read.snapshot_when == (Condition(measure, above, limit, seconds, shown),)
    assert read.problems == ()


def test_conditions_are_joined() -> None:
    text = "reset or usage>98%/30s  OR\tpreemptions>20/1m or crash or reset"
    found = read_when(text)
    assert [each.text for each in found] == ["reset", "usage>98%/30s", "preemptions>20/1m", "crash"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("evictions>3/1m", "there is no 'evictions', only preemptions, usage, hit_rate, queue_p95"),
        ("usage>98/30s", "write usage as in usage>98%/30s"),
        ("usage>98%", "write usage as in usage>98%/30s"),
        ("usage>=98%/30s", "write usage as in usage>98%/30s"),
        ("usage>-1%/30s", "write usage as in usage>98%/30s"),
        ("usage>101%/30s", "usage is at most 100%"),
        ("hit_rate<20s/5m", "write hit_rate as in hit_rate<20%/5m"),
        ("preemptions>20%/1m", "write preemptions as in preemptions>20/1m"),
        ("preemptions>2.5/1m", "preemptions are a whole number"),
        ("preemptions>2/1.5m", "write preemptions as in preemptions>20/1m"),
        ("preemptions>20/1m, reset", "write preemptions as in preemptions>20/1m"),
        ("preemptions>20/1m and reset", "write preemptions as in preemptions>20/1m"),
        ("preemptions>２０/1m", "write preemptions as in preemptions>20/1m"),
        ("queue_p95>2/1m", "write queue_p95 as in queue_p95>2s/1m"),
        ("queue_p95>2%/1m", "write queue_p95 as in queue_p95>2s/1m"),
        ("queue_p95>2s/0s", "queue_p95 looks back from 1s to 1h, not 0s"),
        ("queue_p95>2s/2h", "queue_p95 looks back from 1s to 1h, not 2h"),
        ("reset>3/1m", "reset stands alone, without a limit"),
        ("reset or", "a condition is missing beside 'or'"),
        ("or", "a condition is missing beside 'or'"),
        ("reset or or crash", "a condition is missing beside 'or'"),
        ("1", "there is no '1', only"),
        (">", "there is no '', only"),
        ("x" * 5_000, f"there is no '{'x' * 30}', only"),
    ],
)
def test_what_is_not_understood_is_one_line_and_takes_nothing(text: str, what: str) -> None:
    read = config.read({WHEN: text})
    (line,) = read.problems
    assert read.snapshot_when == ()
    assert line.startswith(f"{WHEN}={text[:20]}")
    assert f"({what}" in line
    assert line.endswith("'or' joins conditions); no snapshot is taken by itself")
    assert len(line) < 350
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        *[("5,10m", Limit(5, 600.0)), ("1", Limit(1, 600.0)), (" 1.5H ", Limit(5, 5400.0))],
        *[("30s , 2", Limit(2, 30.0)), ("3,0s", Limit(3, 0.0))],
    ],
)
def test_a_limit(text: str, limit: Limit) -> None:
    read = config.read({LIMIT: text})
    assert (read.snapshot_limit, read.problems) == (limit, ())


@pytest.mark.parametrize("text", ["0", "2.5", "5,6", "1m,2m", "5,", "5d", "all", "-1", "5,10m,1s"])
def test_what_is_no_limit(text: str) -> None:
    read = config.read({LIMIT: text})
    (line,) = read.problems
    assert read.snapshot_limit == Limit(5, 600.0)
    assert line.startswith(f"{LIMIT}={text} is not understood (")
    assert line.endswith("the default is used: 5,10m")


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), (" 1.5 H", 5400), ("10m", 600)])
def test_how_much_is_covered(text: str, seconds: float) -> None:
    read = config.read({LAST: text})
    assert (read.snapshot_last_sec, read.problems) == (seconds, ())


@pytest.mark.parametrize("text", ["0s", "10", "m", "5,10m", "all", "-1m"])
def test_what_is_no_time(text: str) -> None:
    read = config.read({LAST: text})
    (line,) = read.problems
    assert read.snapshot_last_sec == 600.0
    assert line.startswith(f"{LAST}={text} is not understood (")
    assert line.endswith("the default is used: 10m")


def test_the_docs_have_each_measure() -> None:
    text = Path(ROOT, "docs", "snapshot.md").read_text()
    rows = re.findall(r"^\| `([a-z_0-9]+)` \| `([^`]+)` \|", text, re.MULTILINE)
    assert dict(rows) == {**EXAMPLES, **{event: event for event in EVENTS}}
    assert set(EXAMPLES) == set(MEASURES)
    for example in EXAMPLES.values():
        assert read_when(example)[0].text == example
