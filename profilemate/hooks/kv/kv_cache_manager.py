# SPDX-License-Identifier: Apache-2.0
"""Record prefix-cache lookups, and which request's blocks are freed or parked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from profilemate.format.events import Op
from profilemate.hooks.instances import has_method, hook, reference, require_method
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
        require_method(manager, "get_computed_blocks")
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
    if not has_method(manager, name):
        return
    now, keep, index = time.monotonic_ns, part.keep, requests.index
    looked_up = requests.looked_up

    def begin(_: Any) -> None:
        nesting.depth += 1

    def end(_: None, __: Any) -> None:
        nesting.depth -= 1

    def after(found: Any, _: None, request: Any) -> None:
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

    part.on_stop(
        hook(manager, name, "request", before=begin, after=after, lastly=end, given="place")
    )


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
    this, now = reference(manager), time.monotonic_ns

    def before(request: Any) -> None:
        try:
            if request.status == requests.running:
                # Its blocks of this very step will be in no table that the step returns.
                request_id = request.request_id
                number = requests.number(request, now())
                part.keep(table_of(this(), request_id, number))
                _record_preemption(part, number, request)
                forget_prefill(request_id)
            else:
                number = requests.leaving(request, now())
            context.request = number + 1
        except Exception as error:
            part.fail("free", error)

    def end(_: None, __: Any) -> None:
        context.request = 0

    part.on_stop(hook(manager, "free", "request", before=before, lastly=end, given="place"))


def table_of(manager: Any, request_id: str, number: int) -> encode.Event:
    """All blocks that a request holds, as an event."""
    block_ids: Sequence[Sequence[int]]
    if has_method(manager, "get_block_ids"):
        block_ids = manager.get_block_ids(request_id)
    else:
        # In vLLM 0.8.5, whose only group is the manager's own.
        block_ids = [[block.block_id for block in manager.req_to_blocks.get(request_id, ())]]
    return encode.held, Op.TABLE, (number,), [list(group) for group in block_ids]


def _watch_park(
    manager: Any,
    part: Part,
    requests: Requests,
    forget_prefill: Callable[[str], None],
    tabled: bool,
) -> None:
    name = "pop_blocks_for_free"
    if not has_method(manager, name):
        return
    keep = part.keep

    def after(blocks: Any, request: Any) -> None:
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
            part.fail(name, error)

    part.on_stop(hook(manager, name, "request", after=after, given="place"))


def _record_preemption(part: Part, number: int, request: Any) -> None:
    # vLLM forgets the tokens once the blocks are given up.
    numbers = number, request.num_computed_tokens
    part.keep((encode.once, Op.PREEMPT, time.monotonic_ns(), numbers))
