# SPDX-License-Identifier: Apache-2.0
"""Which configurations are tried, and what of a session cannot be simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.errors import RuleError, SessionError
from analysis.tables.session import open_session
from analysis.whatif.configuration import (
    Choices,
    Configuration,
    configurations,
    numbers,
    pools,
    recorded,
    switches,
    words,
)
from analysis.whatif.workload import of_session, read_workload
from tests.analysis.builder import METADATA, SessionBuilder

BASE = Configuration(
    label="as recorded",
    num_blocks=999,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    prefix_caching=True,
    policy="fcfs",
    chunked_prefill=True,
    max_model_len=4096,
    max_num_active_seqs=32,
)

SCHEDULER = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "chunked_prefill": True,
    "async_scheduling": False,
    "policy": "fcfs",
}


def tried(**choices: Any) -> list[tuple[str, int, int]]:
    found = configurations(BASE, Choices(**choices), has_contents=True)
    return [(one.label, one.gpu_blocks, one.block_size) for one in found]


def test_a_factor_is_of_the_memory_and_a_number_of_vllms_blocks() -> None:
    assert tried(blocks=pools("0.5x, 2x,4000")) == [
        ("0.5x blocks", 500, 16),
        ("2x blocks", 2000, 16),
        ("4,000 blocks", 4000, 16),
    ]


def test_other_blocks_are_in_the_same_memory() -> None:
    assert tried(block_size=(8, 32)) == [("block size 8", 2000, 8), ("block size 32", 500, 32)]
    assert tried(blocks=pools("2x,300"), block_size=(32,)) == [
        ("2x blocks, block size 32", 1000, 32),
        ("300 blocks, block size 32", 300, 32),
    ]


def test_all_combinations_but_the_recorded_one() -> None:
    found = configurations(
        BASE,
        Choices(max_num_seqs=(16, 64), prefix_caching=(True, False), policy=("priority", "fcfs")),
        has_contents=True,
    )
    assert [one.label for one in found] == [
        "16 seqs, priority",
        "16 seqs",
        "16 seqs, caching off, priority",
        "16 seqs, caching off",
        "priority",
        "caching off, priority",
        "caching off",
    ]
    # Fewer may run than are allowed to be active.
    assert [one.max_num_active_seqs for one in found] == [16] * 4 + [32] * 3


@pytest.mark.parametrize(
    "text", ["", "x", "0x", "2000x", "-1", "1", "4000.5", "nan", "1e3", "4 000"]
)
def test_no_size_of_a_pool(text: str) -> None:
    with pytest.raises(RuleError, match="is no size of a pool"):
        pools(text)


def test_no_number_no_switch_no_word() -> None:
    for text in ("0", "1.5", "-3", "a", "", "1,,2"):
        with pytest.raises(RuleError, match="is no number"):
            numbers(text)
    with pytest.raises(RuleError, match="'maybe' is none of on, off"):
        switches("on,maybe")
    assert words("Priority, fcfs", ("fcfs", "priority")) == ("priority", "fcfs")


def test_a_pool_without_a_usable_block() -> None:
    with pytest.raises(RuleError, match="no usable block"):
        configurations(BASE, Choices(blocks=pools("0.01x"), block_size=(128,)), has_contents=True)


def session(folder: Path, **metadata: Any) -> Any:
    built = SessionBuilder(folder)
    built.metadata(**{"scheduler": SCHEDULER, **metadata})
    row = {"timestamp": 5, "input_length": 20, "output_length": 3, "block_size": 16}
    built.requests(row | {"hash_ids": [1, 2], "request_id": "r", "engine": 0})
    return of_session(open_session(built.folder))


def test_what_the_session_ran_with(tmp_path: Path) -> None:
    base, notes = recorded(session(tmp_path), Choices())
    assert notes == ()
    assert (base.gpu_blocks, base.block_size, base.max_num_seqs) == (101, 16, 64)
    assert (base.max_model_len, base.batches, base.max_num_active_seqs) == (1000, 1, None)


def test_batches_in_flight(tmp_path: Path) -> None:
    metadata = {"scheduler": SCHEDULER | {"async_scheduling": True}}
    base, _ = recorded(session(tmp_path / "a", **metadata), Choices())
    assert (base.async_scheduling, base.batches) == (True, 2)
    base, _ = recorded(session(tmp_path / "b", parallel={"pipeline": 4}), Choices())
    assert (base.async_scheduling, base.batches) == (False, 4)


def test_what_is_not_recorded_is_said(tmp_path: Path) -> None:
    _, notes = recorded(session(tmp_path, scheduler={"speculative_tokens": 3}), Choices())
    assert [note.partition(" ")[0] for note in notes] == [
        "speculative",
        "whether",
        "max_num_seqs",
        "max_num_batched_tokens",
        "policy",
        "chunked_prefill",
    ]
    assert "max_num_seqs is not recorded; simulated with 256" in notes


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    groups = [{"kind": kind, "block_size": 16} for kind in ("FullAttentionSpec", "MambaSpec")]
    with pytest.raises(SessionError, match="group 1 has no mamba_cache_mode"):
        recorded(session(tmp_path / "a", groups=groups), Choices())
    cache = {name: value for name, value in METADATA["cache"].items() if name != "blocks"}
    with pytest.raises(SessionError, match="how large the pool"):
        recorded(session(tmp_path / "b", cache=cache), Choices())
    without = session(tmp_path / "c", cache=METADATA["cache"] | {"prefix_caching": False})
    base, _ = recorded(without, Choices())
    with pytest.raises(RuleError, match="prefix caching cannot be tried"):
        configurations(base, Choices(prefix_caching=(True,)), has_contents=False)


def test_a_trace_needs_a_pool(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n'
    )
    workload = read_workload(trace)
    for choices in (Choices(), Choices(blocks=pools("2x"))):
        with pytest.raises(RuleError, match="--blocks 4000"):
            recorded(workload, choices)
    base, _ = recorded(workload, Choices(blocks=pools("2x,500"), block_size=(32, 64)))
    assert (base.gpu_blocks, base.block_size, base.max_model_len) == (500, 32, 610)
