# SPDX-License-Identifier: Apache-2.0
"""Record prefix-cache lookups, and which request's blocks are freed or parked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from profilemate.format.events import Op
from profilemate.hooks.instances import own_method, put, reference, required_method
from profilemate.hooks.kv.block_pool import FreeContext
from profilemate.hooks.kv.requests import Requests
from profilemate.hooks.parts import Part
from profilemate.record import encode


class Nesting:
    """How many lookups are under way, one within the other. A connector's may call the plain one:
    that is one lookup and not two."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0


def watch_lookups(manager: Any, part: Part, requests: Requests) -> None:
    """Hook the methods by which the scheduler looks requests up in the prefix cache.

    Args:
        manager: the KVCacheManager, or whatever stands in its place.
        part: where events go.
        requests: numbers of the engine's requests.

    """
    if getattr(manager, "enable_caching", True):
        nesting = Nesting()
        required_method(manager, "get_computed_blocks")
        for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
            _watch_lookup(manager, name, part, requests, nesting)


def watch_frees(
    manager: Any,
    part: Part,
    requests: Requests,
    context: FreeContext,
    forget_prefill: Callable[[str], None],
    *,
    tabled: bool,
) -> None:
    """Hook the methods by which a request gives its blocks up.

    Args:
        manager: the KVCacheManager, or whatever stands in its place.
        part: where events go.
        requests: numbers of the engine's requests.
        context: says whose blocks are being freed, as long as they are.
        forget_prefill: called with the id of a request that was preempted.
        tabled: block tables say which blocks a request has, as ``facts.is_tabled`` describes.

    """
    _watch_free(manager, part, requests, context, forget_prefill)
    _watch_park(manager, part, requests, forget_prefill, tabled)


def _watch_lookup(
    manager: Any, name: str, part: Part, requests: Requests, nesting: Nesting
) -> None:
    original, this = own_method(manager, name), reference(manager)
    if original is None:
        return
    now, keep, index = time.monotonic_ns, part.keep, requests.index
    looked_up = requests.looked_up

    def lookup(request: Any, *args: Any, **kwargs: Any) -> Any:
        nesting.depth += 1
        try:
            found = original(this(), request, *args, **kwargs)
        finally:
            nesting.depth -= 1
        try:
            if not nesting.depth:
                number = index.get(request.request_id)
                if number is None:
                    number = requests.number(request, now())
                numbers = number, request.num_tokens, int(found[1]), _skips_reading(request)
                keep((encode.once, Op.LOOKUP, now(), numbers))
                looked_up.add(number)
        except Exception as error:
            part.fail(name, error)
        return found

    part.on_stop(put(manager, name, lookup))


def _skips_reading(request: Any) -> bool:
    """Whether the request must not read the prefix cache."""
    if hasattr(request, "skip_reading_prefix_cache"):
        return bool(request.skip_reading_prefix_cache)
    # Up to vLLM 0.11.0 these are requests for the log probabilities of their prompts.
    return getattr(request.sampling_params, "prompt_logprobs", None) is not None


def _watch_free(
    manager: Any,
    part: Part,
    requests: Requests,
    context: FreeContext,
    forget_prefill: Callable[[str], None],
) -> None:
    original, this = required_method(manager, "free"), reference(manager)
    block_ids_of = own_method(manager, "get_block_ids") or _block_ids
    now = time.monotonic_ns

    def free(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if request.status == requests.running:
                # Its blocks of this very step will be in no table that the step returns.
                block_ids = block_ids_of(this(), request.request_id)
                number = requests.number(request, now())
                _record_table(part, number, block_ids)
                _record_preemption(part, number, request)
                forget_prefill(request.request_id)
            else:
                number = requests.leaving(request, now())
            context.request = number + 1
        except Exception as error:
            part.fail("free", error)
        try:
            return original(this(), request, *args, **kwargs)
        finally:
            context.request = 0

    part.on_stop(put(manager, "free", free))


def _block_ids(manager: Any, request_id: str) -> list[list[int]]:
    """The blocks that a request holds, in vLLM 0.8.5, whose only group is the manager's own."""
    return [[block.block_id for block in manager.req_to_blocks.get(request_id, ())]]


def _record_table(part: Part, number: int, block_ids: Sequence[Sequence[int]]) -> None:
    part.keep((encode.held, Op.TABLE, (number,), [list(group) for group in block_ids]))


def _watch_park(
    manager: Any,
    part: Part,
    requests: Requests,
    forget_prefill: Callable[[str], None],
    tabled: bool,
) -> None:
    original, this = own_method(manager, "pop_blocks_for_free"), reference(manager)
    if original is None:
        return
    keep = part.keep

    def pop_blocks_for_free(request: Any) -> Any:
        blocks = original(this(), request)
        try:
            running = request.status == requests.running
            number = requests.leaving(request, time.monotonic_ns())
            if running:
                _record_preemption(part, number, request)
                forget_prefill(request.request_id)
            if tabled and not running:
                keep((encode.untimed, Op.PARK_ALL, (number,)))
            else:
                keep((encode.parked, Op.PARK, number, list(blocks)))
        except Exception as error:
            part.fail("pop_blocks_for_free", error)
        return blocks

    part.on_stop(put(manager, "pop_blocks_for_free", pop_blocks_for_free))


def _record_preemption(part: Part, number: int, request: Any) -> None:
    # vLLM forgets the tokens once the blocks are given up.
    numbers = number, request.num_computed_tokens
    part.keep((encode.once, Op.PREEMPT, time.monotonic_ns(), numbers))
