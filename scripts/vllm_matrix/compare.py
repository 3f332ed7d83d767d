# SPDX-License-Identifier: Apache-2.0
"""Do a session's tables say what was counted by other means?

The tables are read by Python's own csv and json modules.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, str]

_STATE = ("num_blocks", "cached_blocks", "free_blocks")


def differences(session: Path, seen: dict[str, Any]) -> Iterator[str]:
    """Where the tables differ from ``seen``, which is a case's counts.json: one line for each."""
    metadata = json.loads((session / "metadata.json").read_text())
    yield from _metadata(metadata)
    if seen["pausing"]:
        yield from _after_pause(session, metadata, seen)
        return
    for what, written, counted in _pairs(session, seen):
        if written != counted:
            yield f"{what}: {_difference(written, counted)}"
    if any(pool["cached"] for pool in seen["pools"]):
        yield from _contents(_requests(session), seen["prompts"])


def _metadata(metadata: dict[str, Any]) -> Iterator[str]:
    (process,) = metadata["processes"]
    for name, hook in (process["hooks_missing"] | process["hooks_failed"]).items():
        yield f"hook {name}: {hook}"
    for name, gives in process["methods"]["missing"].items():
        yield f"method {name} is missing: {gives}"
    if process["problem"]:
        yield f"journal: {process['problem']}"
    if process["mismatches"]:
        yield f"mismatches with vLLM's own free count: {process['mismatches']}"
    if metadata["dropped_events"]:
        yield f"dropped events: {metadata['dropped_events']}"
    if not metadata["complete"]:
        yield "the session is not complete"


def _after_pause(session: Path, metadata: dict[str, Any], seen: dict[str, Any]) -> Iterator[str]:
    """Where what was recorded after the pause differs from what was counted after it."""
    pauses = metadata["processes"][0]["pauses"]
    if len(pauses) != 1 or pauses[0][1] is None:
        yield f"the pauses are {pauses}"
        return
    end = pauses[0][1]
    for number, counted in enumerate(seen["pools"]):
        where = f" of pool {number}" if len(seen["pools"]) > 1 else ""
        for what, written, counts in _pairs_of_pool(session, str(number), counted, end):
            if written != counts:
                yield f"after the pause, {what}{where}: {_difference(written, counts)}"
    steps = [
        (int(row["scheduled_tokens"]), int(row["scheduled_reqs"]))
        for row in _rows(session, "scheduler_steps", end)
        if row["scheduled_tokens"] != "0"
    ]
    if steps != list(map(tuple, seen["steps"])):
        yield f"after the pause, steps: {_difference(steps, list(map(tuple, seen['steps'])))}"


def _contents(requests: list[dict[str, Any]], prompts: dict[str, list[str]]) -> Iterator[str]:
    """Two blocks of prompts have the same content id just where they hold the same."""
    there: dict[int, str] = {}
    back: dict[str, int] = {}
    for row in requests:
        name = row["request_id"]
        prefixes, ids = prompts[name], row["hash_ids"]
        if len(ids) not in (len(prefixes), len(prefixes) + 1):
            yield f"hash_ids: {len(ids)} for {len(prefixes)} full blocks of {name}"
            return
        for content, prefix in zip(ids, prefixes, strict=False):
            same = there.setdefault(content, prefix), back.setdefault(prefix, content)
            if same != (prefix, content):
                yield f"hash_ids: {content} of {name} stands for another content elsewhere"
                return


def _pairs(session: Path, seen: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What is compared, what the tables say, and what was counted."""
    for number, counted in enumerate(seen["pools"]):
        where = f" of pool {number}" if len(seen["pools"]) > 1 else ""
        for what, written, counts in _pairs_of_pool(session, str(number), counted):
            yield what + where, written, counts
    steps = [row for row in _rows(session, "scheduler_steps") if row["scheduled_tokens"] != "0"]
    lookups = [row for row in _rows(session, "prefix_cache_lookups") if row["admitted"] == "1"]
    requests = {row["request_id"]: row for row in _requests(session)}
    scheduled = [(int(row["scheduled_tokens"]), int(row["scheduled_reqs"])) for row in steps]
    yield "steps (tokens, requests)", scheduled, list(map(tuple, seen["steps"]))
    prefills = [int(row["prefill_tokens"]) for row in steps]
    yield "prefill tokens of steps, as a worker tells them", prefills, seen["prefills"]
    preempted = sum(int(row["preempted_reqs"]) for row in _rows(session, "scheduler_steps"))
    yield "preemptions in all steps", preempted, len(seen["preempted"])
    yield (
        "preemptions by request",
        {name: row["preemptions"] for name, row in requests.items() if row["preemptions"]},
        dict(Counter(seen["preempted"])),
    )
    hits = Counter(_column(requests, "hit_tokens"))
    hits.update(_column(requests, "external_hit_tokens"))
    yield "hit tokens by request", dict(hits), seen["hits"]
    found: Counter[str] = Counter()
    for row in lookups:
        found[row["request_id"]] += int(row["hit_tokens"])
    if seen["block_size"]:
        yield (
            "hit tokens of all admitted lookups, by request",
            {name: tokens for name, tokens in found.items() if tokens},
            {name: blocks * seen["block_size"] for name, blocks in seen["reused_by"].items()},
        )
    external: Counter[str] = Counter()
    for row in lookups:
        external[row["request_id"]] += int(row["external_hit_tokens"])
    yield "tokens loaded by the connector, by request", +external, Counter(seen["loaded"])
    yield "output tokens by request", _column(requests, "output_length"), seen["outputs"]


def _pairs_of_pool(
    session: Path, pool: str, seen: dict[str, Any], since_sec: float = -1.0
) -> Iterator[tuple[str, Any, Any]]:
    moves, evictions, usage = (
        [row for row in _rows(session, table, since_sec) if row["pool"] == pool]
        for table in ("kv_cache_allocations", "kv_cache_evictions", "kv_cache_usage")
    )
    for event, counted in (
        ("allocate", "allocated"),
        ("reuse", "reused"),
        ("free", "freed"),
        ("cache", "cached"),
    ):
        blocks = sum(int(row["num_blocks"]) for row in moves if row["event"] == event)
        yield f"blocks of event {event}", blocks, seen[counted]
    yield "evicted blocks", [int(row["block_id"]) for row in evictions], seen["evicted"]
    states = [tuple(int(row[name]) for name in _STATE) for row in usage]
    counted_states = [tuple(state[:3]) for state in seen["states"]]
    yield "states of the pool", [state for state, _ in groupby(states)], counted_states
    written_usage = dict(zip(states, (row["usage_pct"] for row in usage), strict=True))
    yield (
        "usage_pct by state of the pool",
        written_usage,
        {tuple(state[:3]): f"{state[3]:.2f}" for state in seen["states"]},
    )


def _column(requests: dict[str, Any], name: str) -> dict[str, Any]:
    return {request_id: row[name] for request_id, row in requests.items()}


def _rows(session: Path, table: str, since_sec: float = -1.0) -> list[Row]:
    """The rows that are no earlier."""
    path = session / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if float(row["timestamp_sec"]) >= since_sec]


def _requests(session: Path) -> list[dict[str, Any]]:
    path = session / "requests.jsonl"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def _difference(written: Any, counted: Any) -> str:
    """The first place in which they differ."""
    if isinstance(written, dict):
        for name in sorted(written.keys() | counted.keys()):
            if written.get(name) != counted.get(name):
                return f"{written.get(name)} in the tables, {counted.get(name)} counted, of {name}"
    if isinstance(written, list):
        for at, (mine, other) in enumerate(zip(written, counted, strict=False)):
            if mine != other:
                return f"{mine} in the tables, {other} counted, at {at}"
        return f"{len(written)} in the tables, {len(counted)} counted"
    return f"{written} in the tables, {counted} counted"
