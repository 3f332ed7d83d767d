# SPDX-License-Identifier: Apache-2.0
"""Sessions with speculative decoding, against what vLLM's scheduler did with random drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilemate.simulation.drafting import Acceptance
from tests.analysis.invoke import invoke
from tests.whatif import truth
from tests.whatif.hybrids import shared, window
from tests.whatif.simulating import Recorded
from tests.whatif.test_exact import LIMITS
from tests.whatif.truth import Drafts, Truth

pytestmark = pytest.mark.usefixtures("hooks_on")

SMALL, LARGE = 200, 800


def ran(
    model: Path, folder: Path, blocks: int, *, method: str, tokens: int, chance: float, **more: Any
) -> Truth:
    drafter = {"method": method, "model": str(model), "num_speculative_tokens": tokens}
    return truth.run(
        model,
        folder,
        blocks,
        requests=shared(),
        step_sec=truth.device,
        drafts=Drafts(tokens, chance),
        speculative_config=drafter,
        **LIMITS,
        **more,
    )


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"method": "eagle", "tokens": 3, "chance": 0.7}, id="eagle"),
        pytest.param({"method": "draft_model", "tokens": 2, "chance": 0.5}, id="draft model"),
        pytest.param(
            {
                "method": "eagle",
                "tokens": 3,
                "chance": 0.6,
                "async_scheduling": True,
                "batches": 2,
            },
            id="asynchronous",
        ),
        pytest.param(
            {
                "method": "eagle",
                "tokens": 2,
                "chance": 0.6,
                "specs": window,
                "retention_interval": 0,
            },
            id="windows",
        ),
    ],
)
def test_speculation(model: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    if "specs" in how:
        how = {**how, "specs": how["specs"](16)}
    source = ran(model, tmp_path / "source", SMALL, **how)
    elsewhere = ran(model, tmp_path / "true", LARGE, **how)
    recorded = Recorded(source.session)
    for blocks, true in ((SMALL, source), (LARGE, elsewhere)):
        found = recorded.simulate(model, blocks)
        assert abs((found.hit_rate or 0) - true.hit_rate) <= 0.002
        assert abs((found.evictions or 0) - true.evictions) <= 0.01 * true.evictions
        assert abs((found.steps or 0) - true.steps) <= 0.02 * true.steps
    assert true.hit_rate > 0.04
    without = Recorded(source.session)
    without.base = replace(without.base, speculation=None)
    assert (without.simulate(model).steps or 0) > 1.1 * source.steps


def test_steps_of_answers(model: Path, tmp_path: Path) -> None:
    """Every draft is accepted: four tokens a step after the first one."""
    true = ran(model, tmp_path / "s", 4_000, method="eagle", tokens=3, chance=1.0)
    workload = Recorded(true.session).workload
    more = workload.output_tokens - 1
    assert not np.isfinite(workload.answer_steps[more == 0]).any()
    np.testing.assert_array_equal(workload.answer_steps[more > 0], -(-more[more > 0] // 4))


def test_tokens_are_spread_over_the_steps() -> None:
    acceptance = Acceptance(10, 4)
    assert [acceptance.next(3) for _ in range(4)] == [2, 3, 2, 3]
    bounded = Acceptance(30, 4)
    assert [bounded.next(3) for _ in range(3)] == [4, 4, 4]
    # Where drafts are never accepted, each step gives a token.
    assert [Acceptance(5, 8).next(3) for _ in range(3)] == [1, 1, 1]


def test_the_command_says_what_is_not_known(model: Path, tmp_path: Path) -> None:
    true = ran(model, tmp_path / "s", LARGE, method="draft_model", tokens=2, chance=0.5)
    answer = invoke("whatif", true.session, "--blocks=2x", "--json", "--jobs=1")
    found = json.loads(answer.stdout)
    assert any("which drafts were accepted is not recorded" in note for note in found["notes"])
    steps = {one: found[one]["steps"] for one in ("measured", "baseline")}
    assert abs(steps["baseline"] - steps["measured"]) <= 0.02 * true.steps
    assert [one["label"] for one in found["outcomes"]] == ["2x blocks"]
