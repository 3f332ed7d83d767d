# SPDX-License-Identifier: Apache-2.0
"""What the pool holds, and for whom: situations 15, 16, 19 and 23."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import analysis
from analysis.pool import holders, pressure, usage
from analysis.pool.holders import Holder, Holders, Suspect
from analysis.tables import facts
from tests.situations.bench import Bench
from tests.support.scheduler import tokens


def holders_of(folder: Path) -> Holders:
    session = analysis.open_session(folder, complete=False)
    found = holders.measure(
        session, facts.read(session), usage.measure(session), pressure.states(session)
    )
    assert found is not None
    return found


def test_usage_is_zero_and_the_cache_is_full(bench: Bench) -> None:
    """Four requests of 16 blocks, one after the other, fill 64 usable blocks with contents that
    nobody holds; the fifth takes the first one's."""
    engine = bench.engine(64)
    for number in range(5):
        engine.run(bench.request(f"r{number}", tokens(number, 256), 1), seconds=1)
    assert engine.pool.get_usage() == 0
    tables = engine.end()

    assert tables.usage() == [
        # Per cent, held, cached, free, running, waiting; after schedule() and after the update.
        (25.0, 16, 0, 48, 1, 0),
        (0.0, 0, 16, 48, 0, 0),
        (25.0, 16, 16, 32, 1, 0),
        (0.0, 0, 32, 32, 0, 0),
        (25.0, 16, 32, 16, 1, 0),
        (0.0, 0, 48, 16, 0, 0),
        (25.0, 16, 48, 0, 1, 0),
        (0.0, 0, 64, 0, 0, 0),
        (25.0, 16, 48, 0, 1, 0),
        (0.0, 0, 64, 0, 0, 0),
    ]
    evictions = tables.select(
        "kv_cache_evictions",
        "timestamp_sec",
        "lifetime_sec",
        "idle_sec",
        "evictable_sec",
        "reuse_count",
        "owner_request",
        "evicting_request",
    )
    assert evictions == [(5.0, 4.0, 4.0, 4.0, 0, "r0", "r4")] * 16


def test_prefill_only_traffic_is_seen_between_schedule_and_update(bench: Bench) -> None:
    """Six requests of 512 tokens and one token of output; a step takes 1,024 tokens, so two of
    them: 64 of 200 blocks. They are held from schedule() to update_from_output() only, and what
    makes the others wait is the token budget."""
    engine = bench.engine(200, max_num_batched_tokens=1024)
    requests = [bench.request(f"r{number}", tokens(number, 512), 1) for number in range(6)]
    assert engine.run(*requests) == 3
    tables = engine.end()

    assert tables.usage() == [
        (32.0, 64, 0, 136, 2, 4),
        (0.0, 0, 64, 136, 0, 4),
        (32.0, 64, 64, 72, 2, 2),
        (0.0, 0, 128, 72, 0, 2),
        (32.0, 64, 128, 8, 2, 0),
        (0.0, 0, 192, 8, 0, 0),
    ]
    columns = ("scheduled_tokens", "prefill_tokens", "decode_tokens", "scheduled_reqs")
    assert tables.steps(*columns, "waiting_reqs") == [
        (1024, 1024, 0, 2, 4),
        (1024, 1024, 0, 2, 2),
        (1024, 1024, 0, 2, 0),
    ]
    queued = [row["queue_sec"] for row in tables.requests().values()]
    assert queued == [0.01, 0.01, 0.02, 0.02, 0.03, 0.03]


def test_what_a_preemption_costs_and_who_took_the_blocks(bench: Bench) -> None:
    """Ten usable blocks; a and b hold four each, five from step 2 on. In step 18 a needs a sixth
    (position 80): b is preempted and has computed 80 tokens by then, five full blocks. a takes
    b's fifth block at once and its fourth in step 34 (position 96). Until then b would find 64 of
    its 81 tokens again, from then on 48. a gives its 49th and last token in step 49, so b runs
    again in step 50 and computes 33 tokens, of which it had computed 32 before."""
    engine = bench.engine(10)
    engine.add(bench.request("a", tokens(1, 64), 49), bench.request("b", tokens(2, 64), 20))
    # b has 17 tokens of output by step 18: the others come in steps 50, 51 and 52.
    assert engine.run() == 52
    tables = engine.end()

    # The victim: its blocks are freed in the step that preempted, long before it ends.
    assert tables.steps("step", "preempted_reqs", preempted_reqs=1) == [(18, 1)]
    assert tables.moves(step=18) == [("free", 5, "b", 0), ("allocate", 1, "a", 1)]
    assert {name: row["preemptions"] for name, row in tables.requests().items()} == {"a": 0, "b": 1}
    # Who took its blocks while it waited: position 80 came in second 0.18, position 96 in 0.34.
    columns = ("timestamp_sec", "evictable_sec", "evicting_request", "origin")
    taken = tables.select("kv_cache_evictions", *columns, owner_request="b")
    assert taken == [(0.18, 0.0, "a", "output"), (0.34, 0.16, "a", "prompt")]
    # What was computed again: 81 tokens asked for, less 48 found, less the one that is new.
    assert tables.lookups(kind="resumed") == [
        ("b", 81, 64, "resumed", 0, 15),
        ("b", 81, 48, "resumed", 0, 16),
        ("b", 81, 48, "resumed", 1, 1),
    ]
    assert tables.moves(step=50) == [
        ("reuse", 3, "b", 0),
        # Cached by now: b's first three and all of a's seven (it computed 112 = 7 x 16 tokens).
        ("allocate", 3, "b", 3),
        ("cache", 2, "b", 0),
    ]
    columns = ("step", "scheduled_tokens", "prefill_tokens", "decode_tokens")
    rows = {row[0]: row[1:] for row in tables.steps(*columns)}
    assert [rows[number] for number in (1, 2, 18, 49, 50, 51)] == [
        (128, 128, 0),
        (2, 0, 2),
        (1, 0, 1),
        (1, 0, 1),
        (33, 33, 0),
        (1, 0, 1),
    ]
    # 64 + 64 tokens of prompts: everything above that is the tax, and b's new token.
    assert sum(row[1] for row in rows.values()) == 128 + 32 + 1


def test_shared_blocks_are_freed_by_the_last_that_holds_them(bench: Bench) -> None:
    """long and short share 32 tokens. short, which took them up last, ends first and frees only
    the block that is its own: the shared ones are long's to free, and are evicted as long's."""
    engine = bench.engine(10)
    shared = tokens(1, 32)
    engine.run(
        bench.request("long", shared + tokens(2, 16), 5),
        bench.request("short", shared + tokens(3, 16), 1),
    )
    engine.run(bench.request("sweeper", tokens(4, 160), 1))
    tables = engine.end()

    assert tables.moves(request_id="short") == [
        ("reuse", 2, "short", 0),
        ("allocate", 1, "short", 0),
        ("cache", 1, "short", 0),
        ("free", 1, "short", 0),
    ]
    # 48 + 4 tokens: three full blocks and a part.
    assert tables.moves(request_id="long", event="free") == [("free", 4, "long", 0)]
    owners = tables.select("kv_cache_evictions", "owner_request", "reuse_count")
    assert Counter(owners) == {("long", 1): 2, ("long", 0): 1, ("short", 0): 1}
    # What a request held at its end counts shared blocks, too.
    assert [row["num_blocks"] for row in tables.requests().values()] == [3, 4, 10]


def test_a_leak_is_held_by_an_aborted_request_and_nothing_runs(
    bench: Bench, tmp_path: Path
) -> None:
    """Something pins four blocks of a request and forgets them: the request is aborted, nothing
    runs and nothing waits, and the pool does not get empty. An endless answer looks the same in
    per cent: it is still running, and has no row of its own yet."""
    leaking = bench.engine(20)
    leaking.add(bench.request("gone", tokens(1, 64), 100))
    leaking.step()
    (blocks,) = leaking.scheduler.kv_cache_manager.get_blocks("gone").blocks
    leaking.pool.touch(blocks)
    leaking.abort("gone")
    leaking.wait(3600)
    leaking.run(bench.request("later", tokens(2, 32), 1))
    leaked = leaking.tables_if_killed(tmp_path / "leaked")

    assert leaked.usage()[-1] == (20.0, 4, 2, 14, 0, 0)
    assert leaked.moves(request_id="gone") == [
        ("allocate", 4, "gone", 0),
        ("cache", 4, "gone", 0),
    ]
    assert leaked.moves(event="reuse") == [("reuse", 4, "", 0)]
    assert leaked.moves(event="free") == [("free", 2, "later", 0)]
    gone = leaked.requests()["gone"]
    assert (gone["finish_reason"], gone["num_blocks"], gone["computed_tokens"]) == ("abort", 4, 64)
    found = holders_of(leaked.folder)
    assert (found.held_blocks, found.requests, found.leaked_blocks) == (4, 0, 4)
    assert not found.at_least
    # Nothing has run or waited since later ended, in the last step, when the tables end.
    assert found.idle_sec == 0
    assert found.suspects == (Suspect("gone", 0, 4, 0.01),)

    # Found and let go an hour later: the row names the request that held them last.
    leaking.pool.free_blocks(reversed(blocks))
    leaking.scheduler.reset_prefix_cache()
    tables = leaking.end()
    assert tables.usage()[-1] == (0.0, 0, 0, 20, 0, 0)
    assert tables.moves(event="free") == [
        ("free", 2, "later", 0),
        ("free", 4, "gone", 0),
    ]
    owners = Counter(tables.select("kv_cache_evictions", "owner_request", "reason"))
    assert owners == {("gone", "reset"): 4, ("later", "reset"): 2}


def test_endless_answers_are_held_by_running_requests(bench: Bench, tmp_path: Path) -> None:
    """Two requests of 32 tokens (two blocks) came at second 1 and 101 and never stop; short ones
    come and go. After 300 steps of a second each answer is known by its age and its blocks:
    300 - 1 + 32 + 1 = 331 and 231 tokens, of which 331 and 231 less the last are computed."""
    engine = bench.engine(100)
    engine.add(bench.request("old", tokens(1, 32), 5000))
    engine.step(100, seconds=1)
    engine.add(bench.request("young", tokens(2, 32), 5000))
    for number in range(199):
        engine.add(bench.request(f"short{number}", tokens(3 + number, 16), 1))
        engine.step(seconds=1)
    engine.step(seconds=1)
    tables = engine.tables_if_killed(tmp_path / "now")

    ended = tables.requests()
    assert set(ended) == {f"short{number}" for number in range(199)}
    by_request = {}
    for time, name, event, blocks in tables.select(
        "kv_cache_allocations", "timestamp_sec", "request_id", "event", "num_blocks"
    ):
        if name not in ended and event in ("allocate", "free"):
            since, held = by_request.get(name, (time, 0))
            by_request[name] = (since, held + (blocks if event == "allocate" else -blocks))
    # Computed: 32 + 299 = 331 tokens, 21 blocks; 32 + 199 = 231 tokens, 15 blocks.
    assert by_request == {"old": (1.0, 21), "young": (101.0, 15)}
    assert tables.usage()[-1][:2] == (36.0, 36)
    assert tables.usage()[-1][4:] == (2, 0)
    found = holders_of(tables.folder)
    assert (found.held_blocks, found.blocks, found.leaked_blocks) == (36, 36, 0)
    assert found.oldest == (
        Holder("old", 0, 21, 0, since_sec=1.0, age_sec=299.0),
        Holder("young", 0, 15, 0, since_sec=101.0, age_sec=199.0),
    )
    assert found.idle_sec is None
