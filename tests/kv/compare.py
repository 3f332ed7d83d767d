# SPDX-License-Identifier: Apache-2.0
"""Hold a session's tables against what the oracle counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import Any

from tests.kv.recording import Row, Tables
from tests.support.oracle import SKIPPED, Life, Oracle, State

UsageRow = tuple[int, int, int, int, int]
"""Held, cached, free, running and waiting of one usage row."""


def microseconds(seconds: float) -> int:
    """A time cell as whole microseconds since the session began."""
    return round(seconds * 1e6)


def check_counts(tables: Tables, oracle: Oracle) -> None:
    """The blocks that were allocated, reused, freed, cached and evicted, to the last one."""
    moves = tables.rows("kv_cache_allocations.csv")
    evictions = tables.rows("kv_cache_evictions.csv")
    for pool in range(len(oracle.pools)):
        for event in ("allocate", "reuse", "free", "cache"):
            counted = sum(
                row["num_blocks"] for row in moves if (row["event"], row["pool"]) == (event, pool)
            )
            assert counted == oracle.total(event, pool), event
        evicted = [row["block_id"] for row in evictions if row["pool"] == pool]
        assert evicted == [e.block for e in oracle.evictions if e.pool == pool]
    explicit = sum(row["reason"] == "explicit" for row in evictions)
    assert sum(row["evicted_blocks"] for row in moves) == len(evictions) - explicit


def check_usage(tables: Tables, oracle: Oracle) -> None:
    """The rows are the pool's states, one after the other, each once."""
    rows = tables.rows("kv_cache_usage.csv")
    for number, pool in enumerate(oracle.pools):
        mine = [row for row in rows if row["pool"] == number]
        written = [
            (
                row["num_blocks"],
                row["cached_blocks"],
                row["free_blocks"],
                row["running_reqs"],
                row["waiting_reqs"],
            )
            for row in mine
        ]
        total = pool.num_gpu_blocks - 1
        assert all(row["total_blocks"] == total for row in mine)
        assert all(held + cached + free == total for held, cached, free, *_ in written)
        assert all(
            abs(row["usage_pct"] - 100 * row["num_blocks"] / total) <= 0.00501 for row in mine
        )
        assert not any(before == after for before, after in pairwise(written))
        _check_states(written, [state for state in oracle.states if state.pool == number])


def _check_states(written: list[UsageRow], states: list[State]) -> None:
    """Walk along both; a state that the oracle saw only part of must fit the row, too."""
    at = -1
    for state in states:
        if at < 0 or not _fits(written[at], state):
            at += 1
        assert at < len(written), f"no row for {state}"
        assert _fits(written[at], state), (written[at], state)
    assert at == len(written) - 1


def _fits(written: UsageRow, state: State) -> bool:
    held, cached, free, running, waiting = written
    return (
        held == state.held
        and state.cached in (None, cached)
        and state.free in (None, free)
        and state.running in (None, running)
        and state.waiting in (None, waiting)
    )


def check_usage_at(tables: Tables, oracle: Oracle, origin: int) -> None:
    """At every moment that the oracle noted, the last row up to then is the pool's state."""
    rows = tables.rows("kv_cache_usage.csv")
    for number in range(len(oracle.pools)):
        last: dict[int, Row] = {}
        for row in rows:
            if row["pool"] == number:
                last[microseconds(row["timestamp_sec"])] = row
        times = sorted(last)
        at = -1
        seen: dict[int, State] = {s.time: s for s in oracle.states if s.pool == number}
        for moment, state in sorted(seen.items()):
            while at + 1 < len(times) and times[at + 1] <= (moment - origin) // 1000:
                at += 1
            if at < 0:
                assert (state.held, state.cached) == (0, 0), f"no row up to {state}"
                continue
            row = last[times[at]]
            written = (
                row["num_blocks"],
                row["cached_blocks"],
                row["free_blocks"],
                row["running_reqs"],
                row["waiting_reqs"],
            )
            assert _fits(written, state), (written, state)


def check_moves(tables: Tables, oracle: Oracle, origin: int) -> None:
    """Time, event, request, blocks, step, pool and group of every call that moved blocks.

    Calls that say the same of the same request in one step are taken together: the tables may
    have a row for each where blocks are cached one by one.
    """
    written: Counter[Hashable] = Counter()
    evicted: Counter[Hashable] = Counter()
    for row in tables.rows("kv_cache_allocations.csv"):
        assert row["num_blocks"] or row["event"].startswith("reset")
        key = (
            microseconds(row["timestamp_sec"]),
            row["event"],
            row["step"],
            row["pool"],
            row["group"],
        )
        written[key] += row["num_blocks"] or (row["event"] == "reset_refused")
        evicted[key] += row["evicted_blocks"]
    counted: Counter[Hashable] = Counter()
    destroyed: Counter[Hashable] = Counter()
    for move in oracle.moves:
        key = ((move.time - origin) // 1000, move.event, move.step, move.pool, move.group)
        counted[key] += move.blocks or (move.event == "reset_refused")
        destroyed[key] += move.evicted
    assert +written == +counted
    assert +evicted == +destroyed
    check_names(tables, oracle, origin)


def check_names(tables: Tables, oracle: Oracle, origin: int) -> None:
    """The request of each call that moved blocks, call by call."""
    written: dict[Hashable, list[str]] = defaultdict(list)
    for row in tables.rows("kv_cache_allocations.csv"):
        row_key = (microseconds(row["timestamp_sec"]), row["event"], row["pool"])
        written[row_key] += [row["request_id"]] * row["num_blocks"]
    counted: dict[Hashable, list[frozenset[str]]] = defaultdict(list)
    for move in oracle.moves:
        move_key = ((move.time - origin) // 1000, move.event, move.pool)
        counted[move_key] += [move.requests] * move.blocks
    for key, names in written.items():
        for name, possible in zip(names, counted[key], strict=True):
            assert name in possible or not (name or possible), (key, name, possible)


def check_evictions(tables: Tables, oracle: Oracle, origin: int) -> None:
    """Every column of every eviction; a content's number stands for one hash and no other."""
    rows = tables.rows("kv_cache_evictions.csv")
    assert len(rows) == len(oracle.evictions)
    for row, seen in zip(rows, oracle.evictions, strict=True):
        assert (
            microseconds(row["timestamp_sec"]),
            microseconds(row["lifetime_sec"]),
            microseconds(row["idle_sec"]),
            None if row["evictable_sec"] is None else microseconds(row["evictable_sec"]),
        ) == (
            (seen.time - origin) // 1000,
            seen.lifetime // 1000,
            seen.idle // 1000,
            None if seen.evictable is None else seen.evictable // 1000,
        )
        assert (row["block_id"], row["reuse_count"], row["reason"], row["origin"]) == (
            seen.block,
            seen.reuse_count,
            seen.reason,
            seen.origin,
        )
        assert row["owner_request"] in seen.owners, (row, seen)
        assert row["evicting_request"] == seen.evicting
        assert (row["pool"], row["group"]) == (seen.pool, seen.group)
        assert row["copies_left"] == seen.copies_left
    ids = (row["content_id"] for row in rows)
    check_one_to_one(zip(ids, (_hash(e.content) for e in oracle.evictions), strict=True))


def check_means(tables: Tables, oracle: Oracle) -> None:
    """Mean lifetime and mean idle time, within a millisecond."""
    rows = tables.rows("kv_cache_evictions.csv")
    assert rows
    for column, seen in (
        ("lifetime_sec", [e.lifetime for e in oracle.evictions]),
        ("idle_sec", [e.idle for e in oracle.evictions]),
    ):
        written = sum(row[column] for row in rows) / len(rows)
        assert abs(written - sum(seen) / len(seen) / 1e9) < 0.001


def check_lookups(tables: Tables, oracle: Oracle) -> None:
    """Every lookup of every request, in order: what was asked for, what was found, what for."""
    written: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for row in tables.rows("prefix_cache_lookups.csv"):
        assert row["external_hit_tokens"] == 0
        outcome = (row["query_tokens"], row["hit_tokens"], row["kind"], row["admitted"])
        written[row["request_id"]] += [outcome] * row["lookups"]
    counted: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for lookup in oracle.lookups:
        outcome = (lookup.query, lookup.hit, lookup.kind, int(lookup.admitted))
        counted[lookup.request].append(outcome)
    assert written == counted


def check_steps(tables: Tables, oracle: Oracle) -> None:
    """Every step once, with what it scheduled; steps that scheduled nothing may share a row."""
    written: list[tuple[int, ...]] = []
    for row in tables.rows("scheduler_steps.csv"):
        assert row["step"] == len(written) + 1
        assert row["scheduled_tokens"] == row["prefill_tokens"] + row["decode_tokens"]
        outcome = (
            row["running_reqs"],
            row["waiting_reqs"],
            row["scheduled_tokens"],
            row["prefill_tokens"],
            row["scheduled_reqs"],
            row["preempted_reqs"],
            row["finished_reqs"],
        )
        assert row["repeats"] == 1 or not row["scheduled_tokens"]
        written += [outcome] + [(*outcome[:5], 0, 0)] * (row["repeats"] - 1)
    counted = [
        (s.running, s.waiting, s.scheduled, s.prefill, s.requests, s.preempted, s.finished)
        for s in oracle.steps
    ]
    assert written == counted


def check_requests(tables: Tables, oracle: Oracle, block_size: int, *, caching: bool) -> None:
    """Every request that ended: lengths, hits, preemptions, blocks, and the contents it had."""
    rows = tables.requests()
    ended = {name: life for name, life in oracle.lives.items() if life.finished is not None}
    assert set(rows) == set(ended)
    admitted = {lookup.request: lookup for lookup in oracle.lookups if lookup.admitted}
    contents: list[tuple[int, bytes]] = []
    for name, row in rows.items():
        life = ended[name]
        skipped = name in admitted and admitted[name].kind == SKIPPED
        assert (
            row["input_length"],
            row["output_length"],
            row["hit_tokens"],
            row["preemptions"],
            row["num_blocks"],
            row["finish_reason"],
            row["computed_tokens"],
            row["block_size"],
        ) == (
            len(life.prompt),
            life.output,
            0 if skipped else life.hit,
            life.preemptions,
            life.blocks,
            life.reason,
            max(life.computed, life.computed_before),
            block_size,
        ), (name, row, life)
        if caching:
            contents += _contents(row, life, block_size)
        else:
            assert row["hash_ids"] == row["output_hash_ids"] == []
    check_one_to_one(contents)


def _contents(row: Row, life: Life, block_size: int) -> list[tuple[int, bytes]]:
    """Pairs of content id and vLLM's hash; a partial last block has a number of its own."""
    full, partial = divmod(len(life.prompt), block_size)
    ids = row["hash_ids"]
    assert len(ids) == full + bool(partial)
    tokens = min(max(life.computed, life.computed_before), len(life.prompt) + life.output - 1)
    computed = max(0, tokens // block_size - full)
    assert len(row["output_hash_ids"]) == computed
    hashes = life.hashes[:full]
    once = [f"{life.request_id} partial".encode()] * bool(partial)
    after = life.hashes[full : full + computed]
    return list(zip(ids + row["output_hash_ids"], hashes + once + after, strict=True))


def check_request_times(tables: Tables, oracle: Oracle, origin: int) -> None:
    """When each request came, was admitted, had its first token and ended."""
    for name, row in tables.requests().items():
        life = oracle.lives[name]
        assert life.finished is not None
        assert round(row["timestamp"] * 1e3) == (life.arrived - origin) // 1000
        assert microseconds(row["finish_sec"]) == (life.finished - origin) // 1000
        queued = None if life.admitted is None else life.admitted - life.arrived
        assert _same(row["queue_sec"], queued), name
        first = None if life.first_token is None else life.first_token - origin
        assert _same(row["first_token_sec"], first), name


def _same(written: float | None, nanoseconds: int | None) -> bool:
    if written is None or nanoseconds is None:
        return written is None and nanoseconds is None
    return microseconds(written) == nanoseconds // 1000


def check_prefix_ids(tables: Tables, oracle: Oracle) -> None:
    """Two prompts have the same id at a length exactly if they are equal up to that length."""
    lengths = tables.metadata["prefix_lengths"]
    pairs: list[tuple[int, tuple[int, ...]]] = []
    for name, row in tables.requests().items():
        prompt = oracle.lives[name].prompt
        expected = [length for length in lengths if length <= len(prompt)]
        pairs += zip(
            row["prefix_ids"], (tuple(prompt[:length]) for length in expected), strict=True
        )
    check_one_to_one(pairs)


def check_one_to_one(pairs: Iterable[tuple[Hashable, Hashable]]) -> None:
    """No left value goes with two right ones, nor the other way round."""
    there: dict[Hashable, Hashable] = {}
    back: dict[Hashable, Hashable] = {}
    for left, right in pairs:
        assert there.setdefault(left, right) == right
        assert back.setdefault(right, left) == left


def _hash(content: bytes) -> bytes:
    """vLLM's block hash without the group's number at its end."""
    from vllm.v1.core.kv_cache_utils import get_block_hash

    return bytes(get_block_hash(content))


def check_metadata(tables: Tables, *, ended: str = "exit") -> None:
    """The session is complete, and the collector never disagreed with vLLM's own count."""
    metadata = tables.metadata
    assert metadata["complete"]
    assert metadata["dropped_events"] == 0
    (process,) = metadata["processes"]
    assert process["mismatches"] == 0
    assert process["problem"] is None
    assert process["hooks_failed"] == {}
    assert process["ended"] == ended


def check_everything(
    tables: Tables, oracle: Oracle, origin: int, block_size: int, *, caching: bool = True
) -> None:
    """All checks above that need a clock that stands still within a call."""
    check_metadata(tables)
    check_counts(tables, oracle)
    check_moves(tables, oracle, origin)
    check_evictions(tables, oracle, origin)
    check_usage_at(tables, oracle, origin)
    check_lookups(tables, oracle)
    check_steps(tables, oracle)
    check_requests(tables, oracle, block_size, caching=caching)
    check_request_times(tables, oracle, origin)
    check_prefix_ids(tables, oracle)
