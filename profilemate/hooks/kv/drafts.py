# SPDX-License-Identifier: Apache-2.0
"""Count the tokens that speculation proposed for each request, and those that were accepted.

Only where the engine speculates is there anything to do. A release that tells it in another way
costs these counts, and nothing else.
"""

from __future__ import annotations

from typing import Any

from profilemate.hooks.instances import hook
from profilemate.hooks.kv.requests import Requests
from profilemate.record.recorder import Recorder


def watch(scheduler: Any, recorder: Recorder, requests: Requests) -> None:
    """Count what speculation brings, from now on. Raises nothing."""

    def before(scheduled: Any, result: Any) -> None:
        if requests.drafts is not None:
            try:
                _count(scheduled, result, requests.index, requests.drafts)
            except Exception:
                requests.drafts = None

    try:
        if getattr(scheduler.vllm_config, "speculative_config", None) is None:
            return
        names = "scheduler_output", "model_runner_output"
        # Before vLLM cuts an answer off that has come to its end.
        undo = hook(scheduler, "update_from_output", *names, before=before, given="place")
        recorder.on_stop(undo)
        requests.drafts = {}
    except Exception:
        requests.drafts = None


def _count(
    scheduled: Any, result: Any, numbers: dict[str, int], drafts: dict[int, list[int]]
) -> None:
    """Add a step's drafts, as vLLM's own metrics count them."""
    drafted = scheduled.scheduled_spec_decode_tokens
    if not drafted or not result.sampled_token_ids:
        return
    places, sampled = result.req_id_to_index, result.sampled_token_ids
    # Those that a grammar does not allow are verified, and count for nothing.
    invalid = getattr(scheduled, "num_invalid_spec_tokens", None) or {}
    for request_id, tokens in drafted.items():
        number, place = numbers.get(request_id), places.get(request_id)
        if number is None or place is None or not tokens or not len(sampled[place]):
            continue
        counts = drafts.setdefault(number, [0, 0])
        counts[0] += len(tokens) - invalid.get(request_id, 0)
        counts[1] += len(sampled[place]) - 1
