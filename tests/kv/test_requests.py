# SPDX-License-Identifier: Apache-2.0
"""requests.jsonl: which contents requests share, to the last block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profilemate.record import recorder
from tests.kv.recording import Tables, hooks_only, make_tables, only_session
from tests.kv.transcript import transcript
from tests.support.scheduler import RequestMaker, build_scheduler, tokens

pytestmark = pytest.mark.usefixtures("hooks_on")

BLOCK = 16


def run(model: Path, folder: Path, *batches: list[Any], **arguments: Any) -> Tables:
    """Run one batch of requests after the other."""
    with hooks_only(folder):
        scheduler = build_scheduler(model, 100, **arguments)
        for batch in batches:
            transcript(scheduler, [(0, request) for request in batch])
    return make_tables(only_session(folder), folder / "tables")


def test_turns_of_a_conversation_share_what_was_said(model: Path, tmp_path: Path) -> None:
    """The second turn's prompt is the first one, its answer, and more."""
    make = RequestMaker()
    first = make("first", tokens(1, 40), 31)
    with hooks_only(tmp_path):
        scheduler = build_scheduler(model, 100)
        transcript(scheduler, [(0, first)])
        second = make("second", [*first.all_token_ids, *tokens(2, 25)], 5)
        other = make("other", tokens(3, 40), 31)
        transcript(scheduler, [(0, second), (0, other)])
    rows = make_tables(only_session(tmp_path), tmp_path / "tables").requests()
    # 40 tokens of prompt are two full blocks and a part; 71 tokens are four full blocks and 7.
    assert len(rows["first"]["hash_ids"]) == 3
    assert len(rows["first"]["output_hash_ids"]) == 2
    said = rows["first"]["hash_ids"][:2] + rows["first"]["output_hash_ids"]
    assert rows["second"]["hash_ids"][:4] == said
    assert rows["second"]["hit_tokens"] == 64
    assert len(rows["second"]["hash_ids"]) == 6
    ids = {number for row in rows.values() for number in row["hash_ids"] + row["output_hash_ids"]}
    assert len(ids) == 3 + 2 + (2 + 0) + 3 + 2
    assert not set(rows["other"]["hash_ids"]) & set(rows["first"]["hash_ids"])


def test_a_prompt_of_whole_blocks_has_no_number_used_once(model: Path, tmp_path: Path) -> None:
    make = RequestMaker()
    prompts = [make(f"request {n}", tokens(1, 48), 2) for n in range(2)]
    rows = run(model, tmp_path, prompts[:1], prompts[1:]).requests()
    assert len(rows["request 0"]["hash_ids"]) == 3
    assert rows["request 0"]["hash_ids"] == rows["request 1"]["hash_ids"]


def test_a_number_used_once_is_used_once(model: Path, tmp_path: Path) -> None:
    make = RequestMaker()
    prompts = [make(f"request {n}", tokens(1, 50), 2) for n in range(9)]
    rows = run(model, tmp_path, prompts).requests()
    assert len({tuple(row["hash_ids"][:3]) for row in rows.values()}) == 1
    assert len({row["hash_ids"][3] for row in rows.values()}) == 9


def test_an_id_may_come_again(model: Path, tmp_path: Path) -> None:
    """A client's request id is no key: each request has a row of its own."""
    make = RequestMaker()
    batches = [[make("same", tokens(seed, 20 + seed), 2 + seed)] for seed in range(3)]
    tables = run(model, tmp_path, *batches)
    lines = (tables.folder / "requests.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["input_length"], row["output_length"]) for row in rows] == [
        (20, 2),
        (21, 3),
        (22, 4),
    ]


def test_tenants_and_adapters_share_nothing(model: Path, tmp_path: Path) -> None:
    """The same tokens under another salt or another adapter are other contents and prefixes."""
    from vllm.lora.request import LoRARequest

    make = RequestMaker()
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "salt a": {"cache_salt": "a"},
        "salt b": {"cache_salt": "b"},
        "adapter": {"lora_request": LoRARequest("mine", 1, "/adapters/mine")},
    }
    batches = [
        [make(f"{kind} {turn}", tokens(1, 64), 2, **fields) for kind, fields in kinds.items()]
        for turn in (1, 2)
    ]
    rows = run(model, tmp_path, *batches).requests()
    for column in ("hash_ids", "prefix_ids"):
        assert len({tuple(row[column]) for row in rows.values()}) == len(kinds)
        for kind in kinds:
            assert rows[f"{kind} 1"][column] == rows[f"{kind} 2"][column]
    assert [rows[f"{kind} 2"]["hit_tokens"] for kind in kinds] == [48] * 4
    assert rows["adapter 1"]["lora"] == "mine"
    assert rows["plain 1"]["lora"] is None
    tenants = [rows[f"{kind} {turn}"]["tenant"] for turn in (1, 2) for kind in kinds]
    assert tenants[:4] == tenants[4:]
    assert tenants[0] is tenants[3] is None
    assert tenants[1] != tenants[2]


def test_prefixes_shorter_than_a_block_are_seen(model: Path, tmp_path: Path) -> None:
    """240 tokens in common and blocks of 256: no content is shared, and yet it shows where."""
    make = RequestMaker(256)
    prompts = [make(f"request {n}", tokens(1, 240) + tokens(50 + n, 60), 2) for n in range(2)]
    tables = run(model, tmp_path, prompts, block_size=256)
    first, second = (row["prefix_ids"] for row in tables.requests().values())
    lengths = tables.metadata["prefix_lengths"]
    equal = [length for length, a, b in zip(lengths, first, second, strict=False) if a == b]
    assert equal == list(range(16, 241, 16))
    assert len(first) == 300 // 16
    (one, two) = (row["hash_ids"] for row in tables.requests().values())
    assert not set(one) & set(two)


def test_without_prefix_caching_there_are_no_contents(model: Path, tmp_path: Path) -> None:
    make = RequestMaker()
    prompts = [make(f"request {n}", tokens(1, 64), 20) for n in range(2)]
    tables = run(model, tmp_path, prompts, enable_prefix_caching=False)
    for row in tables.requests().values():
        assert row["hash_ids"] == row["output_hash_ids"] == []
        assert (row["hit_tokens"], row["num_blocks"]) == (0, 6)
    assert not tables.rows("prefix_cache_lookups.csv")
    assert not tables.rows("kv_cache_evictions.csv")
    assert (
        tables.requests()["request 0"]["prefix_ids"] == tables.requests()["request 1"]["prefix_ids"]
    )


HOSTILE = [
    "",
    "\ud800 half a pair \udfff",
    "two\nlines\r\nand\x00more",
    "=cmd|' /C calc'!A0",
    "\x1b[2J\x1b]0;title\x07",
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "\u202e\u2028\ufeff",
    "x" * 1_000_000,
]


def test_hostile_ids(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All are recorded as they are, and forgotten when their requests have ended."""
    make = RequestMaker()
    requests = [make(name, tokens(n, 20), 3) for n, name in enumerate(HOSTILE)]
    requests += [make(f"{number}" * 9, tokens(number, 20), 1) for number in range(500)]
    with hooks_only(tmp_path):
        scheduler = build_scheduler(model, 100)
        transcript(scheduler, [(n // 50, request) for n, request in enumerate(requests)])
        (opened,) = recorder._living()
        (finish,) = [hook for hook in vars(scheduler).values() if _name(hook) == "_free_request"]
        (numbered,) = {cell.cell_contents for cell in _cells(finish) if _is_requests(cell)}
        assert numbered.index == {}
    assert "profilemate" not in capfd.readouterr().err
    tables = make_tables(only_session(tmp_path), tmp_path / "tables")
    assert tables.metadata["complete"]
    ids = [json.loads(line)["request_id"] for line in _lines(tables)]
    given = [request.request_id for request in requests]
    spelled = [name.encode("utf-8", "backslashreplace").decode() for name in given]
    assert sorted(ids) == sorted(spelled)
    assert opened.dropped == 0


def _name(hook: Any) -> str:
    return getattr(hook, "__name__", "")


def _cells(hook: Any) -> Iterator[Any]:
    """What the functions around a method refer to."""
    for function in hook.__func__.__globals__.values():
        yield from getattr(function, "__closure__", None) or ()


def _is_requests(cell: Any) -> bool:
    return type(cell.cell_contents).__name__ == "Requests"


def _lines(tables: Tables) -> list[str]:
    return (tables.folder / "requests.jsonl").read_text().splitlines()


def test_a_hostile_id_in_a_failure(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a hook says of its failure may hold an id: one line, not a long one, that no terminal
    acts on; and the journal can hold it."""
    make = RequestMaker()
    name = "\x1b[31m\n\ud800" + "x" * 100_000
    with hooks_only(tmp_path):
        scheduler = build_scheduler(model, 100)
        (opened,) = recorder._living()
        opened.fail("free", ValueError(name))
        transcript(scheduler, [(0, make(name, tokens(1, 20), 3))])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "profilemate" in line]
    assert len(line) < 600
    assert line.isprintable()
    metadata = make_tables(only_session(tmp_path), tmp_path / "tables").metadata
    assert not metadata["complete"]
    assert "free" in metadata["processes"][0]["hooks_failed"]


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "header",
    [
        f"00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-00",
        f" 00-{TRACE}-{SPAN}-01\t",
        f"cc-{TRACE}-{SPAN}-01-what-a-later-version-appends",
    ],
)
def test_a_request_names_its_trace(model: Path, tmp_path: Path, header: str) -> None:
    make = RequestMaker()
    headers = {"traceparent": header, "tracestate": "vendor=secret"}
    traced = make("traced", tokens(1, 40), 2, trace_headers=headers, cache_salt="a")
    other = make("other", tokens(2, 40), 2)
    tables = run(model, tmp_path, [traced, other])
    rows = tables.requests()
    assert (rows["traced"]["trace_id"], rows["traced"]["parent_span_id"]) == (TRACE, SPAN)
    assert (rows["other"]["trace_id"], rows["other"]["parent_span_id"]) == (None, None)
    assert tables.metadata["complete"] is True
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert kept
    assert not [file for file in kept if b"secret" in file.read_bytes()]


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": f"00-{TRACE}-{SPAN}-01-more"},
        {"traceparent": f"00-{TRACE.upper()}-{SPAN}-01"},
        {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
        {"traceparent": f"00-{TRACE}-{'0' * 16}-01"},
        {"traceparent": f"ff-{TRACE}-{SPAN}-01"},
        {"traceparent": f"00-{TRACE}-{SPAN}"},
        {"traceparent": f"00-{TRACE}-{SPAN}-01\n"},
        {"traceparent": "=cmd|'/c calc'!A1"},
        {"traceparent": None},
        {"tracestate": "vendor=1"},
    ],
)
def test_a_header_that_names_no_trace_is_as_none(
    model: Path, tmp_path: Path, headers: dict[str, Any]
) -> None:
    request = RequestMaker()("r", tokens(1, 40), 2, trace_headers=headers)
    tables = run(model, tmp_path, [request])
    row = tables.requests()["r"]
    assert (row["trace_id"], row["parent_span_id"]) == (None, None)
    assert tables.metadata["complete"] is True
