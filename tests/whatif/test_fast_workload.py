# SPDX-License-Identifier: Apache-2.0
"""The requests of sessions and traces, and what one configuration did with them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.errors import SessionError
from analysis.tables.session import open_session
from analysis.whatif.ids import Ids
from analysis.whatif.outcome import Outcome
from analysis.whatif.workload import of_session, read_workload
from tests.analysis.builder import SessionBuilder
from tests.support.scheduler import TRACE


def listed(ids: Ids) -> list[list[int]]:
    return [row.tolist() for row in ids]


def trace(folder: Path, *rows: Mapping[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(timestamp: float, length: int, *ids: int, output: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": [*ids],
        **more,
    }


def test_lists_of_different_lengths() -> None:
    ids = Ids.of([[1, 2, 3], [], [4]])
    assert ids.lengths.tolist() == [3, 0, 1]
    assert ids.rows.tolist() == [0, 0, 0, 2]
    assert ids.positions.tolist() == [0, 1, 2, 0]
    assert listed(ids.take(np.array([2, 0]))) == [[4], [1, 2, 3]]
    assert listed(ids.head(np.array([2, 5, -1]))) == [[1, 2], [], []]
    assert listed(ids + Ids.of([[9], [8, 7], []])) == [[1, 2, 3, 9], [8, 7], [4]]


def test_trace(tmp_path: Path) -> None:
    found = read_workload(
        trace(tmp_path, line(2500, 1100, 1, 2, 7, output=30), line(500, 512, 1, output=0))
    )
    assert found.measured is None
    assert (len(found), found.block_size, found.has_contents) == (2, 512, True)
    # In order of arrival; the last token is never computed.
    assert found.arrival_sec.tolist() == [0.5, 2.5]
    assert found.input_tokens.tolist() == [512, 1100]
    assert found.computed_tokens.tolist() == [512, 1129]
    assert listed(found.prompt_ids) == [[1], [1, 2, 7]]
    assert listed(found.chains()) == [[1], [1, 2]]


def test_block_size_of_a_trace(tmp_path: Path) -> None:
    found = read_workload(trace(tmp_path, line(0, 35, 1, 2, 3, block_size=16)))
    assert found.block_size == 16
    assert listed(found.chains()) == [[1, 2]]


def test_zipped_trace() -> None:
    found = read_workload(TRACE)
    with gzip.open(TRACE, "rt") as lines:
        rows = [json.loads(text) for text in lines]
    assert len(found) == 3_000
    assert found.input_tokens.sum() == sum(row["input_length"] for row in rows)
    assert found.prompt_ids.values.tolist() == [
        number for row in rows for number in row["hash_ids"]
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: it is not an object"),
        ('{"timestamp": 1}', "line 2: input_length is missing"),
        (json.dumps(line(-1, 10)), "line 2: timestamp is not a number from 0 on"),
        ('{"input_length": 1}', "line 2: timestamp is missing; repair or remove that line"),
        (json.dumps({**line(1, 10), "hash_ids": None}), "line 2: hash_ids is missing"),
        (json.dumps({**line(1, 10), "output_length": "9"}), "line 2: output_length is not a num"),
        (json.dumps(line(1, 0)), "line 2: input_length is 0"),
        (
            json.dumps(line(1, 1024, 1, block_size=512)),
            "line 2: hash_ids has 1 ids where the prompt of 1,024 tokens has 2 blocks of 512",
        ),
        (
            json.dumps(line(1, 1024, 1, 2, 3, block_size=512)),
            "line 2: hash_ids has 3 ids where the prompt of 1,024 tokens has 2 blocks of 512",
        ),
        (json.dumps({**line(1, 10), "output_length": 10**9}), "line 2: output_length is no number"),
        (json.dumps({**line(1, 10), "input_length": 10.5}), "line 2: input_length is no number of"),
        ("[" * 100_000, "line 2: it is not JSON"),
        (json.dumps(line(1, 10, block_size=0)), "line 2: block_size is not a number from 1 on"),
        (
            json.dumps({**line(1, 10), "hash_ids": ["a"]}),
            "line 2: hash_ids is not a list of whole numbers",
        ),
    ],
)
def test_malformed_trace(tmp_path: Path, row: str, said: str) -> None:
    path = trace(tmp_path, line(0, 10, 1))
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(SessionError, match=said):
        read_workload(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\x93\xff\x00\xfe\n")
    with pytest.raises(SessionError, match="line 1: it is no text; name a file with a line of"):
        read_workload(path)


def test_sizes_that_differ(tmp_path: Path) -> None:
    path = trace(tmp_path, line(0, 10, 1, block_size=16), line(1, 10, 2, block_size=32))
    with pytest.raises(SessionError, match="16 tokens in one line and for 32"):
        read_workload(path)


def test_no_trace(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SessionError, match="is empty"):
        read_workload(tmp_path / "empty.jsonl")
    with pytest.raises(SessionError, match="there is no folder"):
        read_workload(tmp_path / "missing.jsonl")
    (tmp_path / "cut.gz").write_bytes(TRACE.read_bytes()[:1000])
    with pytest.raises(SessionError, match="cannot read"):
        read_workload(tmp_path / "cut.gz")


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    """Two requests of a conversation on engine 0, one on engine 1, one aborted in the queue."""
    built = SessionBuilder(tmp_path / "session")
    built.requests(
        # 40 prompt tokens: two full blocks of 16; with 9 of the output a third one.
        {
            "timestamp": 1000,
            "input_length": 40,
            "output_length": 9,
            "hash_ids": [11, 12, 1],
            "output_hash_ids": [13],
            "block_size": 16,
            "queue_sec": 0.5,
            "first_token_sec": 1.75,
            "finish_sec": 4,
            "finish_reason": "stop",
            "computed_tokens": 48,
            "priority": 2,
            "tenant": 5,
        },
        {
            "timestamp": 500,
            "input_length": 20,
            "output_length": 0,
            "hash_ids": [11, 2],
            "block_size": 16,
            "finish_sec": 0.75,
            "finish_reason": "abort",
            "computed_tokens": 0,
        },
        {
            "timestamp": 2000,
            "input_length": 16,
            "output_length": 1,
            "hash_ids": [31],
            "block_size": 16,
            "queue_sec": 0.25,
            "finish_sec": 3,
            "engine": 1,
        },
    )
    built.lookups(
        {"request_id": "a", "timestamp_sec": 1.5, "query_tokens": 40, "hit_tokens": 16},
        {"request_id": "b", "timestamp_sec": 2.5, "query_tokens": 16, "hit_tokens": 0, "engine": 1},
    )
    built.evictions({}, {}, {"engine": 1})
    built.rows(
        "scheduler_steps.csv",
        {"scheduled_tokens": 40, "preempted_reqs": 1},
        {"scheduled_tokens": 0, "repeats": 9},
        {"scheduled_tokens": 16, "engine": 1},
    )
    return built


def test_session(session: SessionBuilder) -> None:
    found = read_workload(session.folder)
    assert found.arrival_sec.tolist() == [0.5, 1.0, 2.0]
    assert listed(found.prompt_ids) == [[11, 2], [11, 12, 1], [31]]
    assert listed(found.output_ids) == [[], [13], []]
    # What was aborted in the queue has computed nothing; 48 tokens are three blocks.
    assert listed(found.chains()) == [[], [11, 12, 13], [31]]
    assert found.aborted.tolist() == [True, False, False]
    assert found.engine.tolist() == [0, 0, 1]
    assert found.engines == (0, 1)
    assert found.priority.tolist() == [0, 2, 0]
    assert found.tenant.tolist() == [-1, 5, -1]
    assert found.admitted_sec[1:].tolist() == [1.5, 2.25]
    assert np.isnan(found.admitted_sec[0])
    assert found.measured is not None
    assert found.measured.num_blocks == 100
    assert found.measured.outcome == Outcome(
        engine="measured",
        label="as it ran",
        num_blocks=100,
        block_size=16,
        policy="lru",
        requests=2,
        query_tokens=56,
        hit_tokens=16,
        evictions=3,
        preemptions=1,
        steps=2,
        queue_mean_sec=0.375,
        queue_p99_sec=0.4975,
        span_sec=3.5,
    )
    assert found.measured.outcome.hit_rate == 16 / 56
    assert found.measured.outcome.says == "measured"


def test_one_engine_of_a_session(session: SessionBuilder) -> None:
    found = read_workload(session.folder, engine=1)
    assert listed(found.prompt_ids) == [[31]]
    assert found.measured is not None
    assert found.measured.outcome is not None
    assert (found.measured.outcome.query_tokens, found.measured.outcome.evictions) == (16, 1)
    with pytest.raises(SessionError, match="no request of engine 7"):
        read_workload(session.folder, engine=7)


def test_warm_up_does_not_count(session: SessionBuilder) -> None:
    found = of_session(open_session(session.folder, after_sec=1.5))
    assert found.counts.tolist() == [False, False, True]
    assert found.measured is not None
    assert found.measured.outcome is not None
    assert found.measured.outcome.span_sec == 1


def test_no_contents_with_prefix_caching_off(tmp_path: Path) -> None:
    built = SessionBuilder(tmp_path / "session")
    built.requests({"input_length": 33, "output_length": 2, "block_size": 16})
    found = read_workload(built.folder)
    assert not found.has_contents
    # Contents that nothing else has.
    assert len(set(found.prompt_ids.values.tolist())) == 3


@pytest.mark.parametrize(
    ("size", "chains"),
    [
        # Two requests that share blocks 1 and 2 of 16 tokens, and have 53 and 48 tokens.
        (32, [["b"], ["b"]]),
        (8, [["a1", "a", "b1", "b", "c1", "c"], ["a1", "a", "b1", "b", "d1", "d"]]),
        # 48 tokens end with the third old block, which the two do not share.
        (24, [["b1", "c"], ["b1", "d"]]),
    ],
)
def test_other_block_size(tmp_path: Path, size: int, chains: list[list[str]]) -> None:
    path = trace(
        tmp_path,
        line(0, 53, 1, 2, 3, 4, block_size=16),
        line(1, 48, 1, 2, 5, block_size=16),
    )
    found = read_workload(path).resized(size)
    assert found.block_size == size
    names: dict[int, str] = {}
    for got, wanted in zip(listed(found.chains()), chains, strict=True):
        assert [names.setdefault(number, name) for number, name in zip(got, wanted, strict=True)]
        assert [names[number] for number in got] == wanted
    assert len(set(names.values())) == len(names)
    assert found.prompt_ids.lengths.tolist() == [-(-53 // size), -(-48 // size)]


@pytest.mark.parametrize(
    ("engine", "says"), [("measured", "measured"), ("exact", "replayed"), ("fast", "modelled")]
)
def test_the_json_names_each_engine_as_documented(engine: Any, says: str) -> None:
    """Programs read this value, so it stays whatever the text calls it: docs/whatif.md."""
    outcome = Outcome(
        engine=engine,
        label="",
        num_blocks=1,
        block_size=16,
        policy="lru",
        requests=0,
        query_tokens=0,
        hit_tokens=0,
        evictions=0,
    )
    assert outcome.says == says
