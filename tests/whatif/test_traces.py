# SPDX-License-Identifier: Apache-2.0
"""Traces as they are published: what an id stands for, units of time, CSV, turns that wait."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from analysis.errors import RuleError, SessionError
from analysis.whatif import fast
from analysis.whatif.clock import StepTime
from analysis.whatif.configuration import Choices, configurations, pools, recorded
from analysis.whatif.workload import read_workload
from profilemate.simulation.engine import Engine
from tests.analysis.invoke import invoke
from tests.support.scheduler import TRACE


def trace(folder: Path, *rows: Mapping[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(length: int, ids: int, first: int = 0, **more: Any) -> dict[str, Any]:
    numbers = [*range(first, first + ids)]
    return {
        "timestamp": 0,
        "input_length": length,
        "output_length": 1,
        "hash_ids": numbers,
    } | more


def bailian(**more: Any) -> dict[str, Any]:
    """A line as Bailian's traces have it."""
    more = {"chat_id": 159, "parent_chat_id": 55, "type": "text", "turn": 2} | more
    return line(521, 33, timestamp=61.114, **more)


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        pytest.param([line(521, 33)], 16, id="one line of Bailian's"),
        pytest.param([line(100, 2), line(640, 10), line(641, 11)], 64, id="Dynamo's"),
        pytest.param([line(1000, 31)], 32, id="the last partial block has no id"),
        pytest.param([line(600, 2), line(5000, 10)], 512, id="Mooncake's"),
        pytest.param([line(100, 1)], 512, id="nothing speaks against it"),
        pytest.param([line(399, 3), line(201, 3)], 100, id="no power of two"),
        pytest.param([line(521, 33, block_size=16)], 16, id="it says so"),
    ],
)
def test_what_an_id_stands_for(tmp_path: Path, rows: list[dict[str, Any]], size: int) -> None:
    found = read_workload(trace(tmp_path, *rows))
    assert found.block_size == size
    # No id is dropped.
    assert found.prompt_ids.head(found.prompt_ids.lengths).lengths.tolist() == [
        -(-row["input_length"] // size) for row in rows
    ]
    says = f"an id stands for {size} tokens, as the lengths of lines prove"
    deduced = size != 512 and "block_size" not in rows[0]
    assert found.notes == ((says,) if deduced else ())


def test_mooncake_proves_its_own_size() -> None:
    for size in (510, 511, 512):
        assert read_workload(TRACE, tokens_per_id=size).block_size == size
    for size, said in ((509, "at least 510"), (513, "at most 512")):
        with pytest.raises(SessionError, match=said):
            read_workload(TRACE, tokens_per_id=size)


def test_what_is_given_is_held_against_the_lines(tmp_path: Path) -> None:
    path = trace(tmp_path, line(15, 1), line(521, 33))
    assert read_workload(path, tokens_per_id=16).block_size == 16
    said = r"--tokens-per-id 512: line 3 has 33 ids for 521 tokens in .*at most 16"
    with pytest.raises(SessionError, match=said):
        read_workload(path, tokens_per_id=512)
    path = trace(tmp_path, line(521, 33, block_size=16))
    with pytest.raises(SessionError, match="line 1: block_size is 16, and --tokens-per-id 32"):
        read_workload(path, tokens_per_id=32)


def test_what_lines_leave_open_or_contradict(tmp_path: Path) -> None:
    path = trace(tmp_path, line(100, 5))
    with pytest.raises(SessionError, match="may stand for 17 to 24 tokens; say for how many"):
        read_workload(path)
    assert read_workload(path, tokens_per_id=20).block_size == 20
    path = trace(tmp_path, line(2000, 1))
    with pytest.raises(SessionError, match="line 1 has 1 id for 2,000 tokens, so that an id stan"):
        read_workload(path)
    path = trace(tmp_path, line(521, 33), line(640, 10))
    said = "contradicts itself: line 3 has 10 ids for 640 tokens.*line 1 has 33 ids for 521"
    with pytest.raises(SessionError, match=said):
        read_workload(path)


def test_units_of_time(tmp_path: Path) -> None:
    path = trace(tmp_path, bailian())
    found = read_workload(path)
    assert found.arrival_sec.tolist() == pytest.approx([61.114])
    assert "times are read as seconds, as its lines have a parent_chat_id" in found.notes
    assert read_workload(path, time_unit="ms").arrival_sec.tolist() == pytest.approx([0.061114])
    path = trace(tmp_path, line(10, 1, timestamp=2_500))
    assert read_workload(path).arrival_sec.tolist() == [2.5]
    assert read_workload(path, time_unit="us").arrival_sec.tolist() == [0.0025]
    assert read_workload(path).notes == ()
    path = trace(tmp_path, line(10, 1, timestamp=2.5))
    assert read_workload(path).arrival_sec.tolist() == [0.0025]
    assert "where they are seconds, say --time-unit s" in read_workload(path).notes[0]
    # profilemate's own times are milliseconds with fractions.
    path = trace(tmp_path, line(10, 1, timestamp=2.5, request_id="r"))
    assert read_workload(path).notes == ()


@pytest.mark.parametrize("large", [2**63, 2**64, 2**200, -5])
def test_ids_of_any_size(tmp_path: Path, large: int) -> None:
    """Hashes of 64 bits and more are equal where they are equal, and nothing else."""
    ids = [[large, large + 1], [large, large + 2], [large + 1, large]]
    rows = [
        line(33, 2, block_size=16, timestamp=at) | {"hash_ids": own} for at, own in enumerate(ids)
    ]
    found = read_workload(trace(tmp_path, *rows))
    assert [chain.tolist() for chain in found.chains()] == [[0, 1], [0, 2], [1, 0]]
    assert fast.curve(found, [9], ["lru"]).points[0].outcomes[0].hit_tokens == 16


def test_a_missing_key_of_the_first_line(tmp_path: Path) -> None:
    path = trace(tmp_path, {"timestamp": 1, "prompt": "x"})
    said = "line 1: input_length is missing; every line of a trace has timestamp, input_length"
    with pytest.raises(SessionError, match=said):
        read_workload(path)


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{BURST}5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,87,0,87,API log\n")
    found = read_workload(path)
    assert found.arrival_sec.tolist() == [5, 45.5]
    assert (found.input_tokens.tolist(), found.output_tokens.tolist()) == ([472, 87], [18, 0])
    assert not found.has_contents
    assert read_workload(path, time_unit="ms").arrival_sec.tolist() == [0.005, 0.0455]


@pytest.mark.parametrize("zone", ["", "+00:00", "Z"])
def test_azure(tmp_path: Path, zone: str) -> None:
    path = tmp_path / "trace.csv"
    times = ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0800000")
    path.write_text(AZURE + "".join(f"{time}{zone},4808,10\n" for time in times))
    found = read_workload(path)
    assert found.arrival_sec[1] - found.arrival_sec[0] == pytest.approx(0.10004, abs=1e-6)
    assert found.input_tokens.tolist() == [4808, 4808]
    with pytest.raises(SessionError, match="its times are dates"):
        read_workload(path, time_unit="s")


def test_what_csv_cannot_answer(tmp_path: Path) -> None:
    """Queues and preemptions are simulated; what prompts share is not known."""
    path = tmp_path / "trace.csv"
    path.write_text(f"{BURST}5,ChatGPT,472,18,490,Conversation log\n")
    workload = read_workload(path)
    choices = Choices(blocks=pools("100"))
    base, notes = recorded(workload, choices)
    assert not base.prefix_caching
    assert "no contents: prefix caching is off" in notes[0]
    with pytest.raises(RuleError, match="prefix caching cannot be tried"):
        configurations(
            base,
            Choices(blocks=pools("100"), prefix_caching=(True,)),
            has_contents=False,
            is_recorded=False,
        )
    answer = invoke("whatif", path, "--fast")
    assert answer.returncode == 2
    assert "has lengths and times of its requests, and no contents" in answer.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "is CSV whose header has neither BurstGPT's columns Timestamp, Request"),
        (BURST, "has a header and no request"),
        (f"{BURST}1,x,5,1,6,y\nsoon,x,5,1,6,y\n", "line 3: Timestamp is not a time"),
        (f"{BURST}1,x,0,1,6,y\n", "line 2: Request tokens is not a number of tokens from 1 on"),
        (f"{BURST}1,x,5,-1,6,y\n", "line 2: Response tokens is not a number of tokens from 0 on"),
        (f"{BURST}1,x,5,{10**12},6,y\n", "line 2: Response tokens is not a number of tokens"),
        (f"{AZURE}yesterday,5,1\n", "line 2: TIMESTAMP is not a time"),
    ],
)
def test_odd_csv(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(SessionError, match=said):
        read_workload(path)
    with pytest.raises(SessionError, match="is CSV and has no ids"):
        read_workload(path, tokens_per_id=16)


def turns() -> list[dict[str, Any]]:
    """A conversation of three turns, the second of which comes 2 s after the first answer, and a
    conversation beside it."""
    return [
        line(40, 3, 100, session_id="b", timestamp=500, block_size=16),
        line(16, 1, session_id="a", output_length=10, block_size=16),
        {**line(48, 3, session_id="a", output_length=5, block_size=16), "timestamp": None}
        | {"delay": 2000},
        {**line(64, 4, session_id="a", block_size=16, delay=100), "timestamp": None},
    ]


def test_turns_that_wait_for_an_answer(tmp_path: Path) -> None:
    found = read_workload(trace(tmp_path, *turns()))
    assert found.waits_for.tolist() == [-1, -1, 0, 2]
    assert found.delay_sec.tolist() == [0, 0, 2, 0.1]
    # For an order of arrival: 30 ms for each token of the answers.
    assert found.arrival_sec.tolist() == pytest.approx([0, 0.5, 2.3, 2.55])
    assert "come after the simulated one" in found.notes[0]
    half = found.after(0, 0, last_half=True)
    assert half.counts.tolist() == [False, False, True, True]


def test_turns_come_when_the_simulated_answer_is_there(model: Path, tmp_path: Path) -> None:
    workload = read_workload(trace(tmp_path, *turns()))
    base, _ = recorded(workload, Choices(blocks=pools("100")))
    for step_sec in (0.5, 0.01):
        outcome = Engine(model, base, workload, StepTime(step_sec)).run().outcome(base)
        # The turns' own steps, one after the other, and the two delays.
        assert outcome.span_sec == pytest.approx((10 + 5 + 1) * step_sec + 2.1)
        assert (outcome.requests, outcome.hit_tokens) == (4, 16 * (0 + 1 + 3))


def test_a_turn_whose_turn_before_never_fits_comes_all_the_same(
    model: Path, tmp_path: Path
) -> None:
    rows = [
        line(320, 20, session_id=1, block_size=16),
        {**line(32, 2, 50, session_id=1, block_size=16, delay=7000), "timestamp": None},
    ]
    workload = read_workload(trace(tmp_path, *rows))
    base, _ = recorded(workload, Choices(blocks=pools("10")))
    outcome = Engine(model, base, workload, StepTime(0.01)).run().outcome(base)
    assert (outcome.requests, outcome.failed_requests) == (1, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens-per-id=0"], "--tokens-per-id is 0; give a number from 1"),
        (["--time-unit=h"], "--time-unit: 'h' is none of s, ms, us, ns"),
    ],
)
def test_wrong_options(tmp_path: Path, options: list[str], said: str) -> None:
    answer = invoke("whatif", trace(tmp_path, line(10, 1)), "--fast", *options)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr


def test_the_text_says_what_was_deduced(tmp_path: Path) -> None:
    shown = " ".join(invoke("whatif", trace(tmp_path, bailian()), "--fast").stdout.split())
    assert "An id stands for 16 tokens, as the lengths of lines prove." in shown
    assert "Times are read as seconds" in shown
