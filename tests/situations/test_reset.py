# SPDX-License-Identifier: Apache-2.0
"""The prefix cache is dropped, or is not: situation 25."""

from __future__ import annotations

from pathlib import Path

from tests.situations.bench import Bench
from tests.support.scheduler import tokens

EVICTION = ("reason", "evicting_request", "owner_request", "copies_left", "evictable_sec")


def test_a_reset_that_was_refused_leaves_a_row_and_the_cache(bench: Bench, tmp_path: Path) -> None:
    """A request runs, so vLLM refuses; nothing is lost, and the next request hits."""
    engine = bench.engine(20)
    prompt = tokens(1, 64)
    engine.add(bench.request("runs", prompt, 5))
    engine.step(2)
    assert not engine.scheduler.reset_prefix_cache()
    killed = engine.tables_if_killed(tmp_path / "killed")
    engine.run(bench.request("next", prompt, 1))
    tables = engine.end()

    columns = ("timestamp_sec", "num_blocks", "evicted_blocks", "request_id", "step", "group")
    refused = [(0.02, 0, 0, "", 2, None)]
    assert killed.select("kv_cache_allocations", *columns, event="reset_refused") == refused
    assert tables.select("kv_cache_allocations", *columns, event="reset_refused") == refused
    assert tables.moves(event="reset") == []
    assert tables.select("kv_cache_evictions", "reason") == []
    assert tables.lookups(request_id="next") == [("next", 64, 48, "first", 1, 1)]


def test_a_reset_while_idle_is_in_the_tables_though_no_step_follows(
    bench: Bench, tmp_path: Path
) -> None:
    """Four blocks of 64 tokens, three of which a second request shares: five contents, one of them
    twice. After the reset the pool is empty, and a second one finds nothing to drop."""
    engine = bench.engine(20)
    prompt = tokens(1, 64)
    engine.run(bench.request("a", prompt, 1), bench.request("b", prompt, 1))
    engine.wait(10)
    assert engine.scheduler.reset_prefix_cache()
    killed = engine.tables_if_killed(tmp_path / "killed")
    assert engine.scheduler.reset_prefix_cache()
    engine.run(bench.request("c", prompt, 1))
    tables = engine.end()

    assert killed.moves()[-1] == ("reset", 5, "", 5)
    assert killed.usage()[-2:] == [(0.0, 0, 5, 15, 0, 0), (0.0, 0, 0, 20, 0, 0)]
    evicted = killed.select("kv_cache_evictions", *EVICTION)
    assert sorted(evicted) == [
        ("reset", "", "a", 0, 10.0),
        *([("reset", "", "b", 0, 10.0)] * 4),
    ]
    assert len(set(killed.select("kv_cache_evictions", "content_id"))) == 4
    assert tables.moves(event="reset") == [("reset", 5, "", 5), ("reset", 0, "", 0)]
    assert len(tables.select("kv_cache_evictions", "reason")) == 5
    assert tables.lookups(request_id="c") == [("c", 64, 0, "first", 1, 1)]


def test_a_reset_that_preempts_what_runs(bench: Bench, tmp_path: Path) -> None:
    """Prompts of 64 and 48 tokens, and after two steps 65 and 49 computed ones: nine blocks held,
    4 + 3 of them full. All are preempted, the last one first, and the seven contents are lost. In
    the next step both run again, without a hit: 66 + 50 tokens, the last of which is new."""
    engine = bench.engine(20)
    engine.add(bench.request("a", tokens(1, 64), 5), bench.request("b", tokens(2, 48), 5))
    engine.step(2)
    engine.wait(1)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    killed = engine.tables_if_killed(tmp_path / "killed")
    engine.run()
    tables = engine.end()

    assert killed.moves()[-3:] == [("free", 4, "b", 0), ("free", 5, "a", 0), ("reset", 7, "", 7)]
    assert killed.usage()[-2:] == [(45.0, 9, 0, 11, 2, 0), (0.0, 0, 0, 20, 0, 2)]
    assert sorted(tables.select("kv_cache_evictions", *EVICTION)) == [
        *([("reset", "", "a", 0, 0.0)] * 4),
        *([("reset", "", "b", 0, 0.0)] * 3),
    ]
    assert tables.lookups(kind="resumed") == [
        ("a", 66, 0, "resumed", 1, 1),
        ("b", 50, 0, "resumed", 1, 1),
    ]
    columns = ("step", "scheduled_tokens", "prefill_tokens", "preempted_reqs")
    assert tables.steps(*columns)[1:4] == [(2, 2, 0, 0), (3, 116, 116, 2), (4, 2, 0, 0)]
    assert {row["preemptions"] for row in tables.requests().values()} == {1}
