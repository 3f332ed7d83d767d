# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` on a GPU: what its engine's process says, against what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cuda.lab import CAPTURE_SIZES, CudaLab, analyzed, table
from tests.support import engine
from tests.support.engine import Answer, answer
from tests.support.scheduler import tokens

pytestmark = pytest.mark.engine

REQUESTS, OUTPUT = 6, 40
"""Requests, and tokens that each asks for."""
MAX_SEQS = 16


@dataclass(frozen=True)
class Served:
    """A server that has ended."""

    session: Path
    answers: list[Answer]
    asked_with_metrics: float
    """Requests that vLLM's own metrics counted."""


@pytest.fixture(scope="session")
def served(cuda: CudaLab, runner: str) -> Served:
    base = cuda.folder / f"serve {runner}" / "sessions"
    with cuda.server(runner, "serve") as server:
        server.wait_until_ready(engine.START_SECONDS)
        answers = [answer(server.port, tokens(seed, 150), OUTPUT) for seed in range(REQUESTS)]
        page = engine.get(server.port, "/metrics")
        server.stop()
        engine.wait_until_settled(base)
    finished = engine.metric(page, "vllm:request_success_total")
    return Served(engine.only_session(base), answers, finished)


def test_requests_are_those_answered(served: Served) -> None:
    assert [len(answer.tokens) for answer in served.answers] == [OUTPUT] * REQUESTS
    recorded = engine.requests(served.session)
    assert len(recorded) == REQUESTS == served.asked_with_metrics
    assert {row["output_length"] for row in recorded} == {OUTPUT}


def test_worker_and_engine_are_recorded(served: Served) -> None:
    known = engine.metadata(served.session)
    assert known["complete"]
    assert {process["role"] for process in known["processes"]} == {"engine", "worker"}
    for process in known["processes"]:
        assert process["hooks_missing"] == process["hooks_failed"] == {}
        assert process["problem"] is None
        assert process["mismatches"] == 0


def test_one_graph_for_each_size_and_mode(served: Served) -> None:
    captured = [
        (row["runtime_mode"], int(row["num_tokens"]))
        for row in table(served.session, "cuda_graph_captures")
        if row["kind"] == "capture"
    ]
    full = [("FULL", size) for size in CAPTURE_SIZES if size <= MAX_SEQS]
    assert sorted(captured) == sorted(full + [("PIECEWISE", size) for size in CAPTURE_SIZES])


def test_executions_are_the_steps(served: Served) -> None:
    ran = [row for row in table(served.session, "cuda_graph_timeline") if row["dummy"] == "0"]
    steps = engine.rows(served.session, "scheduler_steps")
    scheduled = [row for row in steps if row["scheduled_tokens"] != "0"]
    # All of them, though vLLM kills its engine at the end.
    assert len(ran) == len(scheduled)
    assert engine.total(ran, "unpadded_tokens") == engine.total(scheduled, "scheduled_tokens")
    # One request at a time: its prompt is one step, and each further token another.
    decodes = [row for row in ran if row["unpadded_tokens"] == "1"]
    assert len(decodes) >= REQUESTS * (OUTPUT - 1)
    assert {(row["runtime_mode"], row["num_tokens"]) for row in decodes} == {("FULL", "1")}
    prompts = [row for row in ran if row["unpadded_tokens"] == "150"]
    assert len(prompts) == REQUESTS
    assert {(row["runtime_mode"], row["num_tokens"]) for row in prompts} == {("PIECEWISE", "256")}


def test_replays_are_the_executions(served: Served) -> None:
    ran = table(served.session, "cuda_graph_timeline")
    used = {
        (row["runtime_mode"], row["num_tokens"]): int(row["replay_count"])
        for row in table(served.session, "cuda_graph_usage")
    }
    for batch in used:
        rows = [row for row in ran if (row["runtime_mode"], row["num_tokens"]) == batch]
        assert used[batch] == sum(row["num_graphs"] != "0" for row in rows)


def test_gpu_memory_is_sampled(served: Served) -> None:
    (gpu,) = engine.metadata(served.session)["gpus"]
    samples = table(served.session, "gpu_memory")
    assert len(samples) > 1
    for row in samples:
        used, free = int(row["used_bytes"]), int(row["free_bytes"])
        assert 0 < used < used + free <= gpu["total_bytes"]


def test_the_analyzer_answers(served: Served) -> None:
    assert "In a graph          100.00 %" in analyzed(served.session, "--full")
