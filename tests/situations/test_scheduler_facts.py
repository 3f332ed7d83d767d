# SPDX-License-Identifier: Apache-2.0
"""The scheduler's settings, in metadata.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.situations.bench import Bench


def recorded(bench: Bench, **arguments: Any) -> dict[str, Any]:
    scheduler: dict[str, Any] = bench.engine(99, **arguments).end().metadata["scheduler"]
    return scheduler


def test_limits_of_a_step(bench: Bench) -> None:
    facts = recorded(
        bench,
        max_num_seqs=7,
        max_num_batched_tokens=300,
        long_prefill_token_threshold=100,
        scheduling_policy="priority",
        watermark=0.25,
    )
    assert facts["max_num_seqs"] == facts["max_num_active_seqs"] == 7
    assert facts["max_num_batched_tokens"] == facts["max_num_scheduled_tokens"] == 300
    assert facts["long_prefill_token_threshold"] == 100
    assert facts["long_prefill_token_threshold_adaptive"] is False
    assert (facts["scheduler_reserve_full_isl"], facts["chunked_prefill"]) == (True, True)
    assert (facts["watermark"], facts["policy"]) == (0.25, "priority")
    assert (facts["max_loras"], facts["connector"]) == (None, None)
    assert (facts["speculative_method"], facts["drops_hit_unit"]) == (None, False)
    assert (facts["lookahead_tokens"], facts["draft_slots"]) == (0, None)


def test_settings_that_a_release_does_not_have_are_null(bench: Bench) -> None:
    """vLLM 0.32 no longer limits the requests that compute prompts."""
    facts = recorded(bench)
    assert facts["max_num_partial_prefills"] is None
    assert facts["max_long_partial_prefills"] is None


def test_adapters(bench: Bench) -> None:
    assert recorded(bench, enable_lora=True, max_loras=3)["max_loras"] == 3


def test_speculation_that_drops_the_last_block_of_a_hit(bench: Bench, model: Path) -> None:
    drafting = {"num_speculative_tokens": 2, "model": str(model)}
    eagle = recorded(bench, speculative_config={"method": "eagle", **drafting})
    assert (eagle["speculative_method"], eagle["drops_hit_unit"]) == ("eagle", True)
    assert (eagle["speculative_tokens"], eagle["lookahead_tokens"]) == (2, 2)
    model_of_its_own = recorded(bench, speculative_config={"method": "draft_model", **drafting})
    assert model_of_its_own["drops_hit_unit"] is False
