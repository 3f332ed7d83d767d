# SPDX-License-Identifier: Apache-2.0
"""The model of routing against the truth: vLLM's own schedulers, with a router before them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.whatif.routing import answer, replicas
from analysis.whatif.routing.rules import Bounds
from analysis.whatif.workload import Workload, read_workload
from tests.support import scheduler as support
from tests.support.scheduler import RequestMaker, trace_requests

REQUESTS = 1_500
COUNT = 4
BLOCKS = 1_500
"""Of each replica, as vLLM counts them."""
STEP_SEC = 0.03
BLOCK = 16
LONGEST = 8_192
BOUNDS = Bounds(cache_threshold=0.2, balance_abs_threshold=4, balance_rel_threshold=1.2)


class Server:
    """A scheduler whose steps take 30 ms each, on a clock that goes as far as it is told.

    Its load is what it really has, or what it would have if every request took 30 ms a token.
    """

    def __init__(self, model: Path, *, is_planned: bool) -> None:
        self.is_planned = is_planned
        self.scheduler = support.build_scheduler(model, BLOCKS, max_model_len=LONGEST)
        self.asked = self.found = 0
        self.seen: set[tuple[int, ...]] = set()
        self.turn = 0
        self._now = self._ends = self._told = 0.0
        self._planned: list[float] = []
        self._flight: Any = None
        self._counted: set[str] = set()

    @property
    def load(self) -> int:
        if self.is_planned:
            return sum(end > self._told for end in self._planned)
        return len(self.scheduler.requests)

    def advance(self, until: float) -> None:
        self._told = until
        while True:
            if self._flight is not None:
                if self._ends > until:
                    return
                done = support.answer(self.scheduler, self._flight)
                self.scheduler.update_from_output(self._flight, done)
                self._flight, self._now = None, self._ends
            if self._now >= until or not self.scheduler.has_unfinished_requests():
                return
            self._flight = self.scheduler.schedule()
            self._ends = self._now + STEP_SEC
            for new in self._flight.scheduled_new_reqs:
                if new.req_id not in self._counted:
                    self._counted.add(new.req_id)
                    self.asked += len(new.prompt_token_ids)
                    self.found += new.num_computed_tokens

    def add(self, at: float, request: Any) -> None:
        if self._flight is None:
            self._now = max(self._now, at)
        self._planned.append(at + request.max_tokens * STEP_SEC)
        self.scheduler.add_request(request)


Route = Callable[[Any, Sequence[Server]], Server]


def blocks_of(request: Any) -> list[tuple[int, ...]]:
    """Every beginning of the prompt that ends with a full block, as its tokens."""
    tokens = tuple(request.prompt_token_ids)
    return [tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def idlest(servers: Sequence[Server]) -> Server:
    return min(servers, key=lambda one: (one.load, one.turn))


def by_turns(request: Any, servers: Sequence[Server]) -> Server:
    return min(servers, key=lambda one: one.turn)


def by_load(request: Any, servers: Sequence[Server]) -> Server:
    return idlest(servers)


def best(request: Any, servers: Sequence[Server], tokens: Callable[[Server], int]) -> Server:
    loads = sorted(one.load for one in servers)
    if loads[-1] - loads[0] > 4 and loads[-1] > 1.2 * loads[0]:
        return idlest(servers)
    matches = {id(one): tokens(one) for one in servers}
    most = max(matches.values())
    if most / len(request.prompt_token_ids) <= 0.2:
        return idlest(servers)
    return idlest([one for one in servers if matches[id(one)] == most])


def by_prefix(request: Any, servers: Sequence[Server]) -> Server:
    beginnings = blocks_of(request)
    return best(
        request,
        servers,
        lambda one: max((len(begin) for begin in beginnings if begin in one.seen), default=0),
    )


def by_cache(request: Any, servers: Sequence[Server]) -> Server:
    """What vLLM's own lookup finds there now."""
    return best(
        request,
        servers,
        lambda one: int(one.scheduler.kv_cache_manager.get_computed_blocks(request)[1]),
    )


class ByConversation:
    """A turn goes where the turn before it went: the first request that had the last block of what
    it shares with any, if it begins with all full blocks of that one, and is longer."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, ...], tuple[Any, Server]] = {}

    def __call__(self, request: Any, servers: Sequence[Server]) -> Server:
        beginnings = blocks_of(request)
        known = [begin for begin in beginnings if begin in self._first]
        chosen = idlest(servers)
        if known:
            earlier, place = self._first[known[-1]]
            longer = len(request.prompt_token_ids) > len(earlier.prompt_token_ids)
            if longer and len(known) >= len(blocks_of(earlier)):
                chosen = place
        for begin in beginnings:
            self._first.setdefault(begin, (request, chosen))
        return chosen


def true_hit_rate(model: Path, route: Route, faster: int) -> float:
    servers = [Server(model, is_planned=faster > 1) for _ in range(COUNT)]
    for turn, (at_ms, request) in enumerate(
        trace_requests(RequestMaker(), REQUESTS, max_model_len=LONGEST), 1
    ):
        at = at_ms / 1e3 / faster
        for server in servers:
            server.advance(at)
        chosen = route(request, servers)
        chosen.turn = turn
        chosen.seen.update(blocks_of(request))
        chosen.add(at, request)
    for server in servers:
        server.advance(1e9)
    return sum(one.found for one in servers) / sum(one.asked for one in servers)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """The same requests as a trace with ids of 16 tokens."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    with gzip.open(support.TRACE, "rt") as lines, path.open("w") as out:
        for _, line in zip(range(REQUESTS), lines, strict=False):
            row = json.loads(line)
            row["input_length"] = min(
                max(1, row["input_length"] // 32), BLOCK * len(row["hash_ids"])
            )
            row["output_length"] = max(1, row["output_length"] // 32)
            if row["input_length"] + row["output_length"] < LONGEST:
                row["hash_ids"] = row["hash_ids"][: -(-row["input_length"] // BLOCK)]
                out.write(json.dumps(row) + "\n")
    return read_workload(path, tokens_per_id=BLOCK)


@pytest.mark.parametrize(
    ("policy", "router"),
    [
        ("round-robin", lambda: by_turns),
        ("least-loaded", lambda: by_load),
        ("sticky", ByConversation),
        ("prefix-aware", lambda: by_prefix),
        ("cache-aware", lambda: by_cache),
    ],
)
@pytest.mark.parametrize("faster", [1, 8])
def test_hit_rates_are_those_of_real_schedulers(
    model: Path, workload: Workload, policy: str, router: Callable[[], Route], faster: int
) -> None:
    """As the trace has it, by the load that is really there. Eight times as fast, where load
    decides more often, by the load that the model assumes: which request ended first is luck, and
    hangs on milliseconds."""
    quick = replace(workload, arrival_sec=workload.arrival_sec / faster)
    found = answer.routed(
        replicas.of_trace(quick),
        policies=[policy],
        sizes=[BLOCKS - 1] * COUNT,
        bounds=BOUNDS,
        step_sec=STEP_SEC,
    )
    (modelled,) = found.policies
    assert modelled.hit_rate is not None
    assert modelled.evictions
    assert abs(modelled.hit_rate - true_hit_rate(model, router(), faster)) < 0.002
