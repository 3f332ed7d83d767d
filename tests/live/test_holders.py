# SPDX-License-Identifier: Apache-2.0
"""Who holds blocks: what vLLM's own block tables say, or nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from profilemate.live.holders import CONNECTOR, LOST, NO_GROUPS, SEVERAL_GROUPS, Ledger, why_not
from profilemate.live.tails import last_rows
from tests.live.running import Running, mixed, running
from tests.support.scheduler import ANSWER, tokens


def seen(ledger: Ledger, folder: Path) -> dict[str, int] | None:
    """The holders after one more look."""
    ledger.look(last_rows(folder, "scheduler_steps", [0]))
    found = ledger.holders()
    return None if found is None else {holder.request_id: holder.blocks for holder in found}


@pytest.mark.parametrize("seed", range(4))
def test_they_are_those_of_vllm_s_own_tables(
    model: Path, hooks_on: None, tmp_path: Path, seed: int
) -> None:
    """Through hits, preemptions and aborts, whenever one looks."""
    chance, told = random.Random(seed), 0
    with running(model, tmp_path, 24, max_num_seqs=5) as live:
        ledger = Ledger(live.folder)
        for number in range(120):
            mixed(live, chance, number)
            if not number % 7 and live.held:
                live.abort(chance.choice(sorted(live.held)))
            live.step(chance.randrange(1, 6))
            if not number % 3:
                live.write()
                found = seen(ledger, live.folder)
                assert found == live.held
                told += len(found)
        assert told > 50


def test_reused_blocks_and_times(live: Running) -> None:
    live.add("first", tokens(1, 64), 30)
    live.step(2)
    live.add("second", tokens(1, 48) + tokens(2, 10), 30)
    live.step(2)
    live.write()
    ledger = Ledger(live.folder)
    ledger.look(last_rows(live.folder, "scheduler_steps", [0]))
    first, second = sorted(ledger.holders() or (), key=lambda holder: holder.request_id)
    # 64 tokens and two answers' are 5 blocks; of 58 tokens 48 were found.
    assert (first.blocks, first.reused_blocks) == (5, 0)
    assert (second.blocks, second.reused_blocks) == (4, 3)
    assert first.age_sec - second.age_sec == pytest.approx(0.0202)
    assert second.since_sec - first.since_sec == pytest.approx(0.0202)


def test_one_whose_blocks_all_live_on_is_let_go(live: Running) -> None:
    """Nothing of it is freed, so only requests.jsonl tells that it has ended."""
    live.add("first", tokens(1, 31), 2)
    live.step()
    # In the step that fills the first one's second block, which is its last step.
    live.add("second", [*tokens(1, 31), ANSWER, *tokens(5, 10)], 20)
    live.step()
    live.write()
    ledger = Ledger(live.folder)
    assert seen(ledger, live.folder) == live.held == {"first": 2, "second": 3}
    live.step()
    live.write()
    assert "free" not in (live.folder / "kv_cache_allocations.csv").read_text()
    assert seen(ledger, live.folder) == live.held == {"second": 3}


def test_nothing_where_the_beginning_was_not_seen(live: Running) -> None:
    live.add("old", tokens(1, 100), 60)
    live.step(30)
    live.write()
    ledger = Ledger(live.folder, first_bytes=60)
    assert seen(ledger, live.folder) is None
    # The old one ends; then all that hold blocks have been seen from their beginning.
    live.add("new", tokens(2, 100), 60)
    live.step(2)
    live.write()
    assert seen(ledger, live.folder) is None
    live.step(30)
    live.write()
    assert set(live.held) == {"new"}
    assert seen(ledger, live.folder) == live.held


def test_a_prefix_hit_marks_a_beginning(live: Running) -> None:
    live.add("warm", tokens(1, 64), 2)
    live.step(3)
    live.add("old", tokens(9, 64), 40)
    live.step(2)
    live.write()
    size = (live.folder / "kv_cache_allocations.csv").stat().st_size
    live.add("new", tokens(1, 64) + tokens(3, 8), 60)
    live.step(2)
    live.write()
    more = (live.folder / "kv_cache_allocations.csv").stat().st_size - size
    ledger = Ledger(live.folder, first_bytes=more + 1)
    assert seen(ledger, live.folder) is None  # "old" is not among them
    live.abort("old")
    live.step(2)
    live.write()
    assert seen(ledger, live.folder) == live.held
    assert set(live.held) == {"new"}


def test_a_table_that_is_cut_is_read_on(live: Running) -> None:
    """The open table's file moves into a folder, and another one begins with its next row."""
    live.add("first", tokens(1, 64), 200)
    live.step(2)
    live.write()
    ledger = Ledger(live.folder)
    assert seen(ledger, live.folder) == live.held
    live.step(40)
    live.write()
    lines = (live.folder / "kv_cache_allocations.csv").read_bytes().splitlines(keepends=True)
    closing = live.folder / "segments" / ".closing-0001"
    closing.mkdir(parents=True)
    moved = closing / "kv_cache_allocations.csv"
    (live.folder / "kv_cache_allocations.csv").rename(moved)
    moved.write_bytes(b"".join(lines[:-1]))  # in place, as the collector appends
    (live.folder / "kv_cache_allocations.csv").write_bytes(lines[0] + lines[-1])
    assert seen(ledger, live.folder) == live.held


def test_one_that_comes_after_a_cut_is_not_from_the_beginning(live: Running) -> None:
    live.add("first", tokens(1, 64), 200)
    live.step(2)
    live.write()
    (live.folder / "segments" / "0001").mkdir(parents=True)
    path = live.folder / "kv_cache_allocations.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    live.step(60)
    live.write()
    grown = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"".join(grown[len(lines) :]))
    assert seen(Ledger(live.folder), live.folder) is None


def test_where_they_cannot_be_told() -> None:
    one = [{"kind": "FullAttentionSpec"}]
    assert why_not({"groups": one}, []) is None
    assert why_not({}, []) == NO_GROUPS
    assert why_not({"groups": one * 2}, []) == SEVERAL_GROUPS
    assert why_not({"groups": [{"kind": "SlidingWindowSpec"}]}, []) == SEVERAL_GROUPS
    assert why_not({"groups": one, "scheduler": {"connector": "Nixl"}}, []) == CONNECTOR
    assert why_not({"groups": one}, ["frees"]) == LOST
    assert why_not({"groups": one}, ["lookups"]) is None
    assert why_not(json.loads('{"groups": "x"}'), []) == NO_GROUPS
