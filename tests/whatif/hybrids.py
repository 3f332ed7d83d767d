# SPDX-License-Identifier: Apache-2.0
"""Models with several KV cache groups, and requests that share prefixes among each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profilemate.simulation.parts import chunked_local, full_attention, mamba, sliding_window
from tests.support.scheduler import RequestMaker, trace_requests
from tests.whatif.test_exact import LIMITS

REQUESTS = 250


def shared(hashed: int = 16) -> list[tuple[float, Any]]:
    """The trace's short requests, five times as fast as they came. Two of three are sent again
    1.5 s later: as they were, or without their last tokens, so that a prefix ends within them."""
    make = RequestMaker(hashed)
    short = trace_requests(make, REQUESTS, max_model_len=1_200)
    found = [(at / 5, request) for at, request in short]
    for number, (at, request) in enumerate(list(found)):
        if number % 3:
            kept = request.num_prompt_tokens * 5 // 6 if number % 3 == 1 else None
            prompt = request.prompt_token_ids[:kept] or request.prompt_token_ids
            found.append((at + 1_500, make(f"{request.request_id}-again", prompt, 8)))
    found.sort(key=lambda pair: pair[0])
    for number, (at, request) in enumerate(found):
        request.arrival_time = at + number / 1e6
    return found


Specs = Callable[[int], list[Any]]
"""The groups' specs, of a block size."""


def window(size: int) -> list[Any]:
    return [full_attention(size), sliding_window(size, 120)]


def windows(size: int) -> list[Any]:
    return [
        full_attention(size),
        sliding_window(size, 120),
        sliding_window(size, 120),
        sliding_window(size, 500),
    ]


def chunks(size: int) -> list[Any]:
    return [full_attention(size), chunked_local(size, 256)]


def states(size: int) -> list[Any]:
    kept = mamba(4 * size, mamba_cache_mode="align")
    return [full_attention(4 * size), kept, kept]


def checkpoints(size: int) -> list[Any]:
    kept = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": size}
    return [full_attention(4 * size), mamba(4 * size, mamba_cache_mode="align", **kept)]


def mixed(size: int) -> list[Any]:
    """Windows in smaller blocks than the others."""
    return [full_attention(2 * size), sliding_window(size, 120)]


def alone(size: int) -> list[Any]:
    return [sliding_window(size, 200)]


KINDS: dict[str, Specs] = {
    each.__name__: each for each in (window, windows, chunks, states, checkpoints, mixed, alone)
}


def of_groups(specs: Specs, size: int = 16) -> dict[str, Any]:
    """What the scheduler gets for these groups, of which ``size`` tokens are hashed."""
    made = specs(size)
    align = {"mamba_cache_mode": "align"} if specs in (states, checkpoints) else {}
    largest = max(spec.block_size for spec in made)
    return {"specs": made, "block_size": largest, "hash_block_size": size, **align}


def scheduling(specs: Specs, size: int = 16) -> dict[str, Any]:
    """The same, with limits for short requests."""
    return {**LIMITS, **of_groups(specs, size)}
