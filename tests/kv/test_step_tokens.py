# SPDX-License-Identifier: Apache-2.0
"""What a worker makes of the scheduler's output is what the engine's own table says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profilemate.hooks.gpu.step_tokens import Prefills, StepTokens
from tests.kv.recording import hooks_only, make_tables, only_session
from tests.kv.transcript import transcript
from tests.support.scheduler import RequestMaker, build_scheduler, tokens

pytestmark = pytest.mark.usefixtures("hooks_on")


def not_needed(request_id: str) -> int:
    """The step itself says how many tokens a resumed request has."""
    raise AssertionError(request_id)


def load(count: int = 30) -> list[tuple[int, Any]]:
    """Prompts of 40 to 330 tokens with long answers, two at a time."""
    make = RequestMaker()
    return [
        (index // 2, make(f"request {index}", tokens(index, 40 + 10 * index), 60))
        for index in range(count)
    ]


def without_tokens(output: Any) -> Any:
    """As releases before 0.12 tell it."""
    cached = output.scheduled_cached_reqs
    flags = [request_id in cached.resumed_req_ids for request_id in cached.req_ids]
    return SimpleNamespace(
        **{name: getattr(output, name) for name in ("num_scheduled_tokens", "finished_req_ids")},
        total_num_scheduled_tokens=output.total_num_scheduled_tokens,
        scheduled_new_reqs=output.scheduled_new_reqs,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached.req_ids,
            num_computed_tokens=cached.num_computed_tokens,
            resumed_from_preemption=flags,
        ),
    )


def one_by_one(output: Any) -> Any:
    """As releases up to 0.9 tell it."""
    told = without_tokens(output)
    cached = told.scheduled_cached_reqs
    told.scheduled_cached_reqs = [
        SimpleNamespace(req_id=name, num_computed_tokens=computed, resumed_from_preemption=resumed)
        for name, computed, resumed in zip(
            cached.req_ids,
            cached.num_computed_tokens,
            cached.resumed_from_preemption,
            strict=True,
        )
    ]
    return told


@pytest.mark.parametrize("told", ["V1", "V2", "before 0.12", "up to 0.9"])
def test_tokens_by_phase(model: Path, tmp_path: Path, told: str) -> None:
    found: list[StepTokens] = []
    with hooks_only(tmp_path):
        scheduler = build_scheduler(model, 60, max_num_batched_tokens=128, max_num_seqs=8)
        scheduler.use_v2_model_runner = told == "V2"
        if told in ("V1", "V2"):
            prefills = Prefills(not_needed)
        else:
            prefills = Prefills(lambda request_id: scheduler.requests[request_id].num_tokens)
        change = {"before 0.12": without_tokens, "up to 0.9": one_by_one}.get(told, lambda o: o)
        transcript(scheduler, load(), run_model=lambda o: found.append(prefills.of(change(o))))
    rows = make_tables(only_session(tmp_path), tmp_path / "tables").rows("scheduler_steps.csv")
    assert sum(row["preempted_reqs"] for row in rows) >= 5
    kinds = {(row["prefill_tokens"] > 0, row["decode_tokens"] > 0) for row in rows}
    assert kinds >= {(True, False), (False, True), (True, True)}
    written = [(row["prefill_tokens"], row["decode_tokens"], row["scheduled_reqs"]) for row in rows]
    counted = [(s.prefill_tokens, s.decode_tokens, s.prefill_reqs + s.decode_reqs) for s in found]
    assert [step for step in counted if step[2]] == [row for row in written if row[2]]
    # Without drafts a request that computes no prompt has one token.
    assert all(step.decode_reqs == step.decode_tokens for step in found)


def test_drafts_are_of_answers() -> None:
    prefills = Prefills(not_needed)
    new = SimpleNamespace(req_id="a", prompt_token_ids=[1] * 5, num_computed_tokens=0)
    nobody = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    first = SimpleNamespace(
        num_scheduled_tokens={"a": 5},
        total_num_scheduled_tokens=5,
        finished_req_ids=set(),
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=nobody,
    )
    assert prefills.of(first) == StepTokens(5, 0, 1, 0)
    then = SimpleNamespace(**{**vars(first), "scheduled_new_reqs": []})
    then.num_scheduled_tokens, then.total_num_scheduled_tokens = {"a": 4}, 4
    assert prefills.of(then) == StepTokens(0, 4, 0, 1)


def test_a_prompt_of_embeddings() -> None:
    prefills = Prefills(not_needed)
    new = SimpleNamespace(
        req_id="a", prompt_token_ids=None, prompt_embeds=[[0.5]] * 7, num_computed_tokens=3
    )
    nobody = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    step = SimpleNamespace(
        num_scheduled_tokens={"a": 4},
        total_num_scheduled_tokens=4,
        finished_req_ids=set(),
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=nobody,
    )
    assert prefills.of(step) == StepTokens(4, 0, 1, 0)
