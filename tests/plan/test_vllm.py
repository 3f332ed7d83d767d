# SPDX-License-Identifier: Apache-2.0
"""Plans equal what vLLM's own classes and ``kv_cache_utils`` make of real models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session
from analysis.plan import Plan, group, plan, platforms, reality, recorded
from analysis.plan.capacity import lay_out
from analysis.plan.model import Attention
from analysis.plan.weights import measure
from tests.analysis.builder import SessionBuilder
from tests.plan.planned import model_of, settings_of
from tests.plan.truth import CASES, MEMORY, Case

ROOT = Path(__file__).parent.parent.parent
KEEP_STATES = ("jamba", "nemotron", "granite", "falcon", "qwen3-next")
ON_CPUS = [case for case in CASES if case.platform != "gpu" and case.model.startswith(KEEP_STATES)]
"""Those whose blocks depend on the processor."""
KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "latent",
    "SlidingWindowSpec": "window",
    "MambaSpec": "state",
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM makes of the cases, from a process of its own: it changes much in one."""
    out = tmp_path_factory.mktemp("truth") / "truth.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_PROFILING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tests.plan.truth", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_pool_is_vllms(case: Case, truth: dict[str, Any]) -> None:
    expected = truth[str(case)]
    assert_equal(plan(model_of(case), settings_of(case)), expected)


def assert_equal(planned: Plan, expected: dict[str, Any]) -> None:
    assert planned.pool is not None
    assert planned.pool.blocks == expected["blocks"]
    assert planned.pool.tokens == expected["tokens"]
    assert planned.pool.max_concurrency == expected["concurrency"]
    assert planned.max_model_len == expected["max_model_len"]
    assert [
        (one.kind, one.layers, one.block_size, one.page_bytes) for one in planned.layout.groups
    ] == [
        (KINDS[one["kind"]], one["layers"], one["block_size"], one["page_bytes"])
        for one in expected["groups"]
    ]


@pytest.mark.parametrize("case", ON_CPUS, ids=str)
def test_a_session_of_a_cpu(case: Case, truth: dict[str, Any], session: SessionBuilder) -> None:
    """On any machine it is planned as on the processor that its engine had, with other blocks
    than those that the engine made, too."""
    expected = truth[str(case)]
    session.metadata(**expected["recorded"])
    opened = open_session(session.folder)
    settings, model = recorded.settings_of(opened), model_of(case)
    found = reality.against(opened, model, settings)
    assert found.plan.settings.platform.device == "CPU"
    assert_equal(found.plan, expected)
    # The session has a few digits of the sequences at once.
    assert [one.difference for one in found.figures] == [pytest.approx(0, abs=1e-5)] * 3
    (note,) = found.notes
    assert note.startswith("The session records no memory")
    other = replace(settings, block_size=case.block_size, kv_bytes=MEMORY)
    assert_equal(plan(model, other), expected)


def test_the_processor_here(truth: dict[str, Any]) -> None:
    """Found without torch, as torch finds it."""
    bf16, amx = truth["here"]
    name = "cpu-basic" if not bf16 else "cpu-amx" if amx else "cpu-avx512-bf16"
    assert platforms.here().name == name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_asked_agrees(case: Case, truth: dict[str, Any]) -> None:
    asked = truth[str(case)]["layout"]
    ours = lay_out(model_of(case), settings_of(case), group)
    assert asked["decided_by"].startswith("vLLM ")
    assert tuple(asked["bytes_per_block"]) == ours.bytes_per_block
    assert asked["groups"] == [vars(one) for one in ours.groups]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_estimated_well(case: Case, truth: dict[str, Any]) -> None:
    """Within 1 % of the weights of vLLM's own modules, on each stage of the pipeline; within 5 %
    where several GPUs hold the same heads or groups, which the estimate divides."""
    # The truth's weights are not quantized.
    model = replace(model_of(case), quantization=None, quantized_bytes=None)
    shared = [
        layer.kv_heads if isinstance(layer, Attention) else layer.state_groups or case.tensor
        for layer in model.cached
    ]
    found = measure(model, settings_of(case), None)
    assert found is not None
    near = 0.05 if min(shared) < case.tensor else 0.01
    assert found.stage_bytes == pytest.approx(truth[str(case)]["weights"], rel=near)
