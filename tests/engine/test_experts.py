# SPDX-License-Identifier: Apache-2.0
"""A real engine with a mixture-of-experts model: its experts are those that the gates chose.

The application keeps a count of its own, from the outputs of the gates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, summarize
from tests.support import engine
from tests.support.engine import APP, CHOSEN, EXPERTS, MOE_LAYERS, Application, Lab

pytestmark = pytest.mark.engine

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def counted_and_not(lab: Lab) -> Iterator[tuple[Application, Application]]:
    """Runs that have ended, with the experts counted, and without."""
    options = {
        "app": APP.with_name("moe.py"),
        "model": engine.write_moe_model(lab.folder / "moe_model"),
        **IN_PROCESS,
    }
    with (
        lab.application(
            "experts", **options, VLLM_PROFILING_EXPERTS="1", VLLM_PROFILING_PHASES="1"
        ) as counted,
        lab.application("no-experts", **options) as without,
    ):
        assert (counted.wait(), without.wait()) == (0, 0), counted.log
        yield counted, without


@pytest.fixture(scope="module")
def counted(counted_and_not: tuple[Application, Application]) -> Application:
    return counted_and_not[0]


def by_expert(session: Path, layer: int) -> list[int]:
    """The tokens of each expert, of all rows of a layer."""
    counts = [
        list(map(int, row["by_expert"].split(" ")))
        for row in engine.rows(session, "moe_experts")
        if row["layer"] == str(layer)
    ]
    return [sum(column) for column in zip(*counts, strict=True)]


def test_experts_are_those_that_the_gates_chose(counted: Application) -> None:
    result, session = counted.result, counted.session
    # Prompts in several batches, and decodes.
    assert max(result["batches"]) == 256
    assert min(result["batches"]) <= 5
    for layer in range(MOE_LAYERS):
        assert by_expert(session, layer) == result["experts"][layer]
        tokens = [row for row in engine.rows(session, "moe_experts") if row["layer"] == str(layer)]
        assert engine.total(tokens, "tokens") == result["tokens"][layer]
    scheduled = engine.total(engine.rows(session, "scheduler_steps"), "scheduled_tokens")
    assert {scheduled} == set(result["tokens"])


def test_pairs_are_those_that_the_gates_chose(counted: Application) -> None:
    result = counted.result
    pairs = engine.rows(counted.session, "moe_pairs")
    assert {row["layer"] for row in pairs} == {str(layer) for layer in range(MOE_LAYERS)}
    for row in pairs:
        layer, one, other = (int(row[name]) for name in ("layer", "expert", "other_expert"))
        assert int(row["pair_tokens"]) == result["pairs"][layer][f"{one}-{other}"]
        assert int(row["expert_tokens"]) == result["experts"][layer][one]
        assert int(row["other_expert_tokens"]) == result["experts"][layer][other]
        assert int(row["routed_tokens"]) == result["tokens"][layer]


def test_the_session_is_sound_and_says_what_was_counted(counted: Application) -> None:
    known = engine.metadata(counted.session)
    assert known["complete"]
    assert {process["role"] for process in known["processes"]} == {"engine", "worker"}
    for process in known["processes"]:
        assert process["hooks_missing"] == process["hooks_failed"] == process["lost"] == {}
    assert known["experts"] == {
        "layers": list(range(MOE_LAYERS)),
        "experts": EXPERTS,
        "chosen": CHOSEN,
        "pairs": True,
        "ranks": None,
        "eplb": False,
        "problem": None,
    }
    assert known["device"] == "cpu"
    assert known["cuda_graphs"] is known["gpu_memory"] is None
    assert known["gpus"] == []


def test_totals_have_them(counted: Application) -> None:
    (worker,) = json.loads((counted.session / "totals.json").read_text())["workers"]
    assert [layer["by_expert"] for layer in worker["experts"]] == counted.result["experts"]


def test_steps_on_a_cpu_have_no_gpu_time(counted: Application) -> None:
    problem = "no GPU events: the workers run on cpu"
    assert engine.metadata(counted.session)["phases"] == {"workers": [], "problem": problem}
    assert not (counted.session / "gpu_steps.csv").exists()
    found = summarize(open_session(counted.session))
    assert (found.gpu_time.steps, found.gpu_time.problem) == (0, problem)
    # How many tokens they have by phase is known without it.
    assert sum(each.steps for each in found.scheduling.by_phase) == found.scheduling.steps > 0
    assert found.scheduling.encoder is None


def test_the_summary_has_them(counted: Application) -> None:
    found = summarize(open_session(counted.session)).experts
    assert [list(layer.by_expert) for layer in found.layers] == counted.result["experts"]
    assert (found.experts, found.chosen, found.problem) == (EXPERTS, CHOSEN, None)


def test_answers_are_the_same_without(counted_and_not: tuple[Application, Application]) -> None:
    counted, without = counted_and_not
    shared: tuple[str, ...] = ("answers", "experts", "pairs", "batches")
    assert [counted.result[name] for name in shared] == [without.result[name] for name in shared]
    assert len(counted.result["answers"]) == 10


def test_nothing_is_counted_unless_asked_for(
    counted_and_not: tuple[Application, Application],
) -> None:
    _, without = counted_and_not
    found: dict[str, Any] = engine.metadata(without.session)
    assert found["experts"] is None
    assert [process["role"] for process in found["processes"]] == ["engine"]
    assert not list(without.session.glob("moe_*"))
