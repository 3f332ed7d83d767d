# SPDX-License-Identifier: Apache-2.0
"""``LLM`` in one process: what vLLM did is the same with profilemate, and the tables say it.

The application keeps counts of its own inside vLLM's block pool.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.support import engine
from tests.support.engine import BLOCK_SIZE, TOTAL_BLOCKS, Application, Lab

pytestmark = pytest.mark.engine

STATUS = 3
"""What the application ends with."""
OPTIONS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def bare_and_profiled(lab: Lab) -> Iterator[tuple[Application, Application]]:
    """Runs that have ended, without profilemate and with it."""
    with (
        lab.application("bare", "--count", profiled=False, **OPTIONS) as bare,
        lab.application("profiled", "--count", **OPTIONS) as profiled,
    ):
        assert (bare.wait(), profiled.wait()) == (STATUS, STATUS), profiled.log
        yield bare, profiled


@pytest.fixture(scope="module")
def bare(bare_and_profiled: tuple[Application, Application]) -> Application:
    return bare_and_profiled[0]


@pytest.fixture(scope="module")
def profiled(bare_and_profiled: tuple[Application, Application]) -> Application:
    return bare_and_profiled[1]


@pytest.fixture(scope="module")
def session(profiled: Application) -> Path:
    return profiled.session


@pytest.fixture(scope="module")
def off_and_nowhere(lab: Lab) -> Iterator[tuple[Application, Application]]:
    """Runs that have ended, with profilemate switched off, and where it cannot write."""
    (lab.folder / "file").touch()
    nowhere_to_write = {"VLLM_PROFILING_DIR": str(lab.folder / "file" / "sessions")}
    with (
        lab.application("off", "--count", **OPTIONS, VLLM_PROFILING="0") as off,
        lab.application("nowhere", "--count", **OPTIONS, **nowhere_to_write) as nowhere,
    ):
        assert (off.wait(), nowhere.wait()) == (STATUS, STATUS), nowhere.log
        yield off, nowhere


def generated(application: Application) -> list[object]:
    """Token ids and finish reason of every answer."""
    return [application.result["identical"], application.result["mixed"]]


def counts(application: Application) -> dict[str, int]:
    """What the application counted, without the times."""
    return {
        name: count
        for name, count in application.result["counts"].items()
        if isinstance(count, int)
    }


def more_lines(application: Application, than: Application) -> list[str]:
    """Lines of one log that the other lacks, numbers and random names apart."""
    return list((_lines(application) - _lines(than)).elements())


def _lines(application: Application) -> Counter[str]:
    text = re.sub(r"[0-9a-f]{32}|\d+", "#", application.log)
    # How a progress bar is cut into lines depends on time.
    return Counter(line for line in re.split(r"[\r\n]+", text) if "it/s]" not in line)


def test_outputs_are_the_same(bare: Application, profiled: Application) -> None:
    assert generated(profiled) == generated(bare)
    reasons = {reason for _, reason in bare.result["mixed"]}
    assert reasons == {"length", "stop"}


def test_the_pool_does_the_same(bare: Application, profiled: Application) -> None:
    assert counts(profiled) == counts(bare)
    assert counts(bare)["evicted"] > TOTAL_BLOCKS, "the load must overflow the pool"


def test_the_log_has_at_most_one_more_line(bare: Application, profiled: Application) -> None:
    assert len(more_lines(profiled, than=bare)) <= 1
    assert more_lines(bare, than=profiled) == []


def test_the_session_is_sound(session: Path) -> None:
    engine.assert_sound(session)


def test_blocks_are_those_counted_in_the_pool(profiled: Application, session: Path) -> None:
    counted = profiled.result["counts"]
    evictions = pd.read_csv(session / "kv_cache_evictions.csv")
    assert counted["evicted"] == len(evictions)
    for event, name in (("allocate", "allocated"), ("reuse", "reused"), ("free", "freed")):
        assert engine.moved(session, event) == counted[name], event
    assert evictions["lifetime_sec"].mean() == pytest.approx(counted["mean_lifetime"], abs=1e-3)
    assert evictions["idle_sec"].mean() == pytest.approx(counted["mean_idle"], abs=1e-3)
    steps = engine.rows(session, "scheduler_steps")
    assert engine.total(steps, "preempted_reqs") == counted["preemptions"] > 0
    summary = (session / "kv_cache_summary.txt").read_text()
    for line in (
        f"Total blocks available: {TOTAL_BLOCKS}",
        f"Total allocations: {counted['allocated']}",
        f"Total deallocations: {counted['freed']}",
        f"Total evictions: {counted['evicted']}",
    ):
        assert f"\n{line}\n" in summary


def test_seven_of_eight_identical_prompts_hit(session: Path) -> None:
    lookups = engine.rows(session, "prefix_cache_lookups")[:8]
    asked = [int(row["query_tokens"]) for row in lookups]
    hit = [int(row["hit_tokens"]) for row in lookups]
    # The last token is always computed, and with it its block of 32: 31 blocks are left.
    assert asked == [1024] * 8
    assert hit == [0] + [31 * BLOCK_SIZE] * 7
    assert {row["kind"] for row in lookups} == {"first"}
    assert sum(map(bool, hit)) / 8 == 0.875
    assert sum(hit) / sum(asked) == pytest.approx(0.8477, abs=5e-5)
    # vLLM does not deduplicate: the first request's 32 blocks, and the last one of each other.
    moves = engine.rows(session, "kv_cache_allocations")
    cached = [row for row in moves if row["event"] == "cache"][:8]
    assert engine.total(cached, "num_blocks") == 32 + 7


def test_requests_are_those_answered(profiled: Application, session: Path) -> None:
    engine.assert_answered(session, profiled.result)


def test_a_reset_empties_the_cache(session: Path) -> None:
    resets = [
        row for row in engine.rows(session, "kv_cache_allocations") if row["event"] == "reset"
    ]
    evictions = engine.rows(session, "kv_cache_evictions")
    by_reset = [row for row in evictions if row["reason"] == "reset"]
    assert [int(row["num_blocks"]) for row in resets] == [len(by_reset)]
    assert by_reset
    last = engine.rows(session, "kv_cache_usage")[-1]
    assert int(last["cached_blocks"]) == 0
    # So whatever was cached has been evicted by now.
    assert engine.moved(session, "cache") == len(evictions)


def test_the_snippets_of_the_tables_page_run(session: Path) -> None:
    evictions = pd.read_csv(session / "kv_cache_evictions.csv")
    assert evictions["lifetime_sec"].mean() > evictions["idle_sec"].mean() > 0
    usage = pd.read_csv(session / "kv_cache_usage.csv")
    first = ["timestamp_sec", "usage_pct", "num_blocks", "total_blocks"]
    assert list(usage.columns[: len(first)]) == first
    assert usage["usage_pct"].max() > 90
    assert usage["timestamp_sec"].is_monotonic_increasing


def test_switched_off_it_does_nothing(
    bare: Application, off_and_nowhere: tuple[Application, Application]
) -> None:
    off, _ = off_and_nowhere
    assert generated(off) == generated(bare)
    assert more_lines(off, than=bare) == more_lines(bare, than=off) == []
    assert not off.sessions.exists()


def test_with_nowhere_to_write_it_says_so_once(
    bare: Application, off_and_nowhere: tuple[Application, Application]
) -> None:
    _, nowhere = off_and_nowhere
    assert generated(nowhere) == generated(bare)
    (line,) = more_lines(nowhere, than=bare)
    assert line.startswith("profilemate: off, cannot write to ")
    assert "file/sessions" in line
    assert "VLLM_PROFILING_DIR" in line
    assert more_lines(bare, than=nowhere) == []
