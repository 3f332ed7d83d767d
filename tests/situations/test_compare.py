# SPDX-License-Identifier: Apache-2.0
"""The same load on a small pool and on a large one: compared, checked, and shown in the docs."""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import analysis
from analysis import Session
from analysis.judgement import check, measures
from tests.situations.bench import Bench, Engine, PrefixCounts, Tables
from tests.support.scheduler import trace_requests

LIBRARY = Path(__file__).parent.parent.parent / "docs" / "library.md"

REQUESTS = 400
SCHEDULE_SEC, MODEL_SEC = 0.001, 0.029
"""What a step takes."""
SMALL, LARGE = 250, 8000
"""Blocks of the two pools."""


@dataclass(frozen=True)
class Served:
    """What a pool made of the load: its tables, and what vLLM itself counted."""

    tables: Tables
    counted: PrefixCounts

    def open(self, **options: Any) -> Session:
        return analysis.open_session(self.tables.folder, **options)


def serve(bench: Bench, usable_blocks: int, name: str) -> Served:
    """The head of the trace on a pool of this size, each request when it arrived."""
    engine = bench.engine(usable_blocks)
    began = bench.clock.now
    for arrival_ms, request in trace_requests(bench.request, REQUESTS):
        arrival = began + round(arrival_ms * 1e6)
        run_until(engine, arrival)
        bench.clock.now = max(bench.clock.now, arrival)
        engine.add(request)
    run_until(engine, None)
    folder = engine.end().folder
    return Served(Tables(folder.rename(folder.with_name(name))), engine.vllm_counts)


def run_until(engine: Engine, moment: int | None) -> None:
    """Step while there is something to do, and until then."""
    while engine.scheduler.has_unfinished_requests():
        if moment is not None and engine.clock.now >= moment:
            return
        output = engine.schedule(SCHEDULE_SEC)
        engine.wait(MODEL_SEC)
        engine.update(output)


@pytest.fixture
def served(bench: Bench) -> tuple[Served, Served]:
    return serve(bench, SMALL, "small-pool"), serve(bench, LARGE, "large-pool")


def test_a_larger_pool_is_better_and_the_figures_are_vllms_own(
    served: tuple[Served, Served],
) -> None:
    found = analysis.compare(*(pool.open() for pool in served))
    assert found.doubts == ((),)
    differ = {setting.name: setting.values for setting in found.configuration}
    assert differ["cache.blocks"] == (str(SMALL + 1), str(LARGE + 1))
    assert all(name.startswith("cache.") for name in differ)

    rows = {row.name: row for row in found.measures}
    assert rows["hit_rate"].values == tuple(
        pool.counted.hits / pool.counted.queries for pool in served
    )
    assert rows["evictions"].values == tuple(
        len(pool.tables.rows("kv_cache_evictions.csv")) for pool in served
    )
    preempted = tuple(pool.counted.preempted_requests for pool in served)
    assert rows["preemptions"].values == preempted
    assert preempted[0] > preempted[1] == 0
    for name in ("hit_rate", "evictions", "preemptions"):
        assert rows[name].changes[0].verdict == "better"
    # The large pool lost nothing that was asked for again: it is what the small one could be.
    assert rows["evictions_regretted"].values[1] == 0
    assert rows["hit_rate_ceiling"].values == (rows["hit_rate"].values[1],) * 2
    hits = [pool.counted.hits for pool in served]
    assert rows["recomputed_tokens"].values == (hits[1] - hits[0], 0)
    assert rows["requests"].values == (REQUESTS, REQUESTS)


def test_the_smaller_pool_fails_against_the_larger_one(served: tuple[Served, Served]) -> None:
    small, large = (analysis.summarize(pool.open()) for pool in served)
    assert check.check(large, ["hit_rate<0.1"], baseline=small).passed
    checked = check.check(small, ["hit_rate<0.1"], baseline=large, tolerance=0.05)
    failed = [result.measure for result in checked.results if result.failed]
    assert failed[:2] == ["hit_rate", "hit_rate"]
    assert {"preemptions", "preempted_requests", "evictions"} < set(failed)
    assert {"request_hit_rate", "aborted", "too_large"} & set(failed) == set()


@pytest.mark.parametrize("pool", [0, 1])
def test_what_follows_the_first_hundred_requests(served: tuple[Served, Served], pool: int) -> None:
    """Counted again row by row, in Python."""
    tables = served[pool].tables
    arrivals = sorted(row["timestamp"] / 1e3 for row in tables.requests().values())
    begin = arrivals[100]
    session = served[pool].open(after_requests=100)
    assert session.begin_sec == pytest.approx(begin)
    found = measures.of(analysis.summarize(session))

    assert found["requests"] == sum(arrival >= begin for arrival in arrivals)
    lookups = [
        row
        for row in tables.rows("prefix_cache_lookups.csv")
        if row["timestamp_sec"] >= begin and row["admitted"] and row["kind"] != "resumed"
    ]
    hits = sum(row["hit_tokens"] for row in lookups)
    assert found["hit_rate"] == hits / sum(row["query_tokens"] for row in lookups)
    assert found["evictions"] == sum(
        row["timestamp_sec"] >= begin for row in tables.rows("kv_cache_evictions.csv")
    )
    usage = tables.rows("kv_cache_usage.csv")
    states = [row["usage_pct"] for row in usage]
    ends = [row["timestamp_sec"] for row in usage[1:]] + [session.end_sec]
    times = [
        max(0.0, end - max(row["timestamp_sec"], begin))
        for row, end in zip(usage, ends, strict=True)
    ]
    mean = sum(state * time for state, time in zip(states, times, strict=True)) / sum(times)
    assert found["usage_mean"] == pytest.approx(mean)
    assert found["duration"] == pytest.approx(sum(times))
    assert found["usage_peak"] == max(
        row["usage_pct"]
        for row, time in zip(usage, times, strict=True)
        if time or row["timestamp_sec"] >= begin
    )


@pytest.mark.usefixtures("served")
def test_the_worked_example_prints_what_the_documentation_shows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.sessions)
    blocks = re.findall(r"```python\n(.*?)```", LIBRARY.read_text(), re.DOTALL)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "library", None, None)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.attempted > 10
    assert result.failed == 0, "".join(said)
