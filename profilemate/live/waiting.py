# SPDX-License-Identifier: Apache-2.0
"""Why do requests wait now, as far as the last step tells?

The rules are those of ``analysis.requests.waiting_rules`` that need nothing but the step's own row
and the scheduler's limits, and its names. What is left is ``blocks`` where the request at the head
of the queue was looked up and not admitted, and else not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.tables.facts import count
from profilemate.live.tails import Row, seconds, whole

WORDS = {
    "preempting": "the step preempted a request",
    "token_budget": "the step's tokens were all given out",
    "max_num_seqs": "as many run as may",
    "blocks": "for blocks, as it seems",
}

_LOOKED_UP_SEC = 1.0
"""A row of prefix_cache_lookups.csv may stand for so long."""


def reason(step: Row | None, lookup: Row | None, metadata: Mapping[str, Any]) -> str | None:
    """One of ``WORDS``; None where nothing waits, or the last step does not tell why.

    Args:
        step: the engine's last row in scheduler_steps.csv.
        lookup: its last row in prefix_cache_lookups.csv.
        metadata: the session's.

    """
    if step is None or not whole(step["waiting_reqs"]):
        return None
    if whole(step["preempted_reqs"]):
        return "preempting"
    if _spent(step, metadata):
        return "token_budget"
    places = count(metadata, "scheduler.max_num_active_seqs") or count(
        metadata, "scheduler.max_num_seqs"
    )
    running = whole(step["running_reqs"])
    if places is not None and running is not None and running >= places:
        return "max_num_seqs"
    if lookup is None or lookup["admitted"] != "0":
        return None
    since = seconds(step["timestamp_sec"]) - seconds(lookup["timestamp_sec"])
    return "blocks" if since <= _LOOKED_UP_SEC else None


def _spent(step: Row, metadata: Mapping[str, Any]) -> bool:
    tokens, requests = whole(step["scheduled_tokens"]), whole(step["scheduled_reqs"])
    if tokens is None or requests is None:
        return False
    batched = count(metadata, "scheduler.max_num_batched_tokens")
    budget = count(metadata, "scheduler.max_num_scheduled_tokens") or batched
    slots = count(metadata, "scheduler.draft_slots") or 0
    if budget is not None and tokens >= budget:
        return True
    return batched is not None and tokens + slots * (requests + 1) >= batched
