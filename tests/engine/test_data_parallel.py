# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with two data-parallel engines, whose API servers are killed in the end."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.support import engine
from tests.support.engine import START_SECONDS, Answer, Lab, answer
from tests.support.scheduler import tokens

pytestmark = pytest.mark.engine

RANKS = (0, 1)
ANSWERS = 24
OUTPUT = 40
LONG_ANSWERS = 4


@dataclass(frozen=True)
class Served:
    """What was seen of the server, and its session."""

    session: Path
    metrics: str
    """vLLM's metrics after all answers."""
    completed_too_early: bool
    """Whether the session was called complete with the API servers dead and engines alive."""
    alone_sec: float
    """When the API servers were dead, in seconds of the session."""


@pytest.fixture(scope="module")
def served(lab: Lab) -> Served:
    with lab.server("data-parallel", "--data-parallel-size=2") as server:
        server.wait_until_ready(START_SECONDS)
        session = engine.only_session(lab.sessions("data-parallel"))
        engines = engine.wait_for_engines(session, len(RANKS))
        with ThreadPoolExecutor(ANSWERS) as clients:
            asked = [
                clients.submit(answer, server.port, [*tokens(seed % 3, 200), seed], OUTPUT)
                for seed in range(ANSWERS)
            ]
        assert {len(done.result().tokens) for done in asked} == {OUTPUT}
        metrics = engine.get(server.port, "/metrics")

        api_servers = [
            pid
            for pid, title in engine.children(server.process.pid).items()
            if "apiserver" in title.lower()
        ]
        with lab.slow_answers() as slow, ThreadPoolExecutor(LONG_ANSWERS) as clients:
            under_way = Barrier(LONG_ANSWERS + 1, timeout=engine.END_SECONDS)
            asking = [
                clients.submit(ask_for_long_answer, server.port, seed, under_way, slow)
                for seed in range(LONG_ANSWERS)
            ]
            under_way.wait()
            engine.kill(server.process.pid, *api_servers)
            for client in asking:
                client.result()
            alone = engine.elapsed_sec(session)
            size = engine.journal_size(session)
            engine.wait_for(
                "engines to go on whose API servers are dead",
                lambda: engine.journal_size(session) > size,
                engine.END_SECONDS,
            )
        # They leave the collector, which gives way to them, hardly a moment of two processors.
        engine.stop(*engines.values())
        engine.wait_for(
            "tables of engines whose API servers are dead",
            lambda: engine.metadata(session)["duration_sec"] > alone,
            engine.END_SECONDS,
        )
        completed_too_early = engine.metadata(session)["complete"]
        engine.kill(*engines.values())
        engine.wait_for(
            "the session to be complete",
            lambda: engine.metadata(session)["complete"],
            engine.SETTLED_SECONDS,
        )
    engine.wait_until_settled(lab.sessions("data-parallel"))
    return Served(session, metrics, completed_too_early, alone)


def ask_for_long_answer(port: int, seed: int, under_way: Barrier, slow: dict[str, Any]) -> None:
    """Read until the server dies; waits for the others once tokens come."""
    asked = Answer(port, tokens(100 + seed, 100), 1800, **slow).read(3)
    under_way.wait()
    asked.read()


def test_both_engines_are_in_one_session(served: Served) -> None:
    known = engine.metadata(served.session)
    assert [process["rank"] for process in known["processes"]] == list(RANKS)
    assert [process["mismatches"] for process in known["processes"]] == [0, 0]
    assert known["parallel"]["data"] == 2
    assert known["content_ids_shared"]
    for table in ("kv_cache_usage", "kv_cache_allocations", "scheduler_steps"):
        engines = {row["engine"] for row in engine.rows(served.session, table)}
        assert engines == {"0", "1"}, table


def test_each_engines_rows_are_its_own(served: Served) -> None:
    lookups = engine.rows(served.session, "prefix_cache_lookups")
    answered = Counter(
        row["engine"] for row in engine.requests(served.session) if row["output_length"] == OUTPUT
    )
    assert sum(answered.values()) == ANSWERS
    for rank in RANKS:
        own = [
            row for row in lookups if row["engine"] == str(rank) and row["query_tokens"] == "201"
        ]
        labels = {"engine": str(rank)}
        for name, column in (("queries", "query_tokens"), ("hits", "hit_tokens")):
            counted = engine.metric(served.metrics, f"vllm:prefix_cache_{name}_total", **labels)
            assert engine.total(own, column) == counted
            assert counted > 0, "a rank without load proves nothing"
        assert answered[rank] == engine.metric(
            served.metrics, "vllm:request_success_total", finished_reason="length", **labels
        )


def test_usage_adds_up_for_each_engine(served: Served) -> None:
    for row in engine.rows(served.session, "kv_cache_usage"):
        held, cached, free = (int(row[f"{state}_blocks"]) for state in ("num", "cached", "free"))
        assert held + cached + free == int(row["total_blocks"]) == engine.TOTAL_BLOCKS


def test_the_collector_follows_engines_not_their_parent(served: Served) -> None:
    assert not served.completed_too_early
    known = engine.metadata(served.session)
    assert known["complete"]
    assert [process["ended"] for process in known["processes"]] == ["killed", "killed"]
    steps = engine.rows(served.session, "scheduler_steps")
    # A busy machine may let them come to the end of what they were asked for.
    after = [row for row in steps if float(row["timestamp_sec"]) > served.alone_sec]
    assert any(row["running_reqs"] != "0" for row in after)
