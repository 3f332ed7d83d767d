# SPDX-License-Identifier: Apache-2.0
"""How many of a step's tokens are of prompts, as far as a worker can tell from what it is given?

A *prefill* token is one that its request had when it was admitted, last of all after a preemption.
All others are *decode* tokens, drafts included. ``scheduler_steps.csv`` counts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class StepTokens(NamedTuple):
    """Tokens of a step, and its requests that have prefill tokens and those that have none."""

    prefill_tokens: int
    decode_tokens: int
    prefill_reqs: int
    decode_reqs: int


class Prefills:
    """Follows which requests still have tokens of their prompts to compute.

    ``known_tokens`` says how many tokens a request has, by its id: of one that runs again after a
    preemption, where a release does not tell it with the step.
    """

    def __init__(self, known_tokens: Callable[[str], int]) -> None:
        self._known_tokens = known_tokens
        self._left: dict[str, int] = {}

    def of(self, output: Any) -> StepTokens:
        """The tokens of the step that this scheduler's output describes. Each is to be given once,
        in order, before the model runs."""
        left, scheduled = self._left, output.num_scheduled_tokens
        for request_id in output.finished_req_ids:
            left.pop(request_id, None)
        for request in output.scheduled_new_reqs:
            left[request.req_id] = _tokens(request) - request.num_computed_tokens
        for request_id, tokens, computed in self._resumed(output.scheduled_cached_reqs):
            left[request_id] = tokens - computed
        prefill = requests = 0
        for request_id, rest in list(left.items()):
            tokens = min(rest, scheduled.get(request_id, 0))
            if tokens > 0:
                prefill += tokens
                requests += 1
            if tokens >= rest:
                del left[request_id]
            else:
                left[request_id] = rest - tokens
        total = output.total_num_scheduled_tokens
        return StepTokens(prefill, total - prefill, requests, len(scheduled) - requests)

    def _resumed(self, cached: Any) -> Iterator[tuple[str, int, int]]:
        """Requests that run again after a preemption: id, tokens, tokens that are computed."""
        if isinstance(cached, list):
            # Up to 0.9 they come one by one.
            for request in cached:
                if request.resumed_from_preemption:
                    yield self._again(request.req_id, request.num_computed_tokens, {})
            return
        resumed: Iterable[str] | None = getattr(cached, "resumed_req_ids", None)
        if resumed is None:
            flags = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
            resumed = [request_id for request_id, is_resumed in flags if is_resumed]
        if not resumed:
            return
        tokens = getattr(cached, "all_token_ids", None) or {}
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in resumed:
            yield self._again(request_id, computed[request_id], tokens)

    def _again(
        self, request_id: str, computed: int, tokens: dict[str, list[int]]
    ) -> tuple[str, int, int]:
        told = tokens.get(request_id)
        known = self._known_tokens(request_id) if told is None else len(told)
        return request_id, known, computed


def _tokens(request: Any) -> int:
    """The tokens of a request that is new to the worker. To model runner V2 a preempted one is new,
    too, and brings its answer so far."""
    for name in ("prefill_token_ids", "prompt_token_ids", "prompt_embeds"):
        tokens = getattr(request, name, None)
        if tokens is not None:
            return len(tokens)
    raise AttributeError("a new request has no tokens")
