# SPDX-License-Identifier: Apache-2.0
"""What each reason to wait is called."""

from __future__ import annotations

from analysis.tables.facts import Scheduler

_NAMES = {
    "preempting": "Step preempted, admits none",
    "token_budget": "No tokens left in the step",
    "max_num_seqs": "No place among the running",
    "never_fits": "First in line can never run",
    "no_blocks": "No blocks for its next chunk",
    "whole_prompt": "Whole prompt must fit",
    "watermark": "Watermark kept free",
    "blocks": "Not enough blocks",
    "no_chunking": "Prompt is not cut up",
    "lora": "No slot for its adapter",
    "connector": "KV connector",
    "paused": "Paused, or not ready",
    "not_known": "Not known",
}


def reason_name(reason: str, scheduler: Scheduler) -> str:
    """A reason of ``analysis.requests.waiting``, with the limit that it is about."""
    limit = {
        "token_budget": scheduler.max_num_scheduled_tokens,
        "max_num_seqs": scheduler.max_num_active_seqs,
        "lora": scheduler.max_loras,
    }.get(reason)
    return _NAMES[reason] + ("" if limit is None else f" ({limit:,})")


WAITED_FOR = {
    "preempting": "a step that had to preempt",
    "token_budget": "tokens of a step",
    "max_num_seqs": "a place among the running requests",
    "never_fits": "a request that can never run",
    "no_blocks": "free blocks",
    "whole_prompt": "room for a whole prompt",
    "watermark": "blocks above the watermark",
    "blocks": "free blocks",
    "no_chunking": "room for a prompt that is not cut up",
    "lora": "a place for an adapter",
    "connector": "the KV connector",
    "paused": "an engine that was paused",
    "not_known": "a reason that the tables do not show",
}
"""By the reasons of ``analysis.requests.waiting``."""
