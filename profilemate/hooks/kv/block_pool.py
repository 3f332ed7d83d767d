# SPDX-License-Identifier: Apache-2.0
"""Record what happens to the blocks of one pool.

No call that profilemate touches is hotter than four of these. Their hooks keep one tuple and do
nothing else. A failure of ours ends the recording of blocks and never reaches vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import tee
from operator import length_hint
from typing import Any

from profilemate.format.events import MAX_POOLS, Op, op_of
from profilemate.hooks.instances import has_method, hook, reference, require_method
from profilemate.hooks.kv.requests import Requests, hash_bytes
from profilemate.hooks.parts import Part
from profilemate.record import encode

_CACHED = (
    "request",
    "blocks",
    "num_cached_blocks",
    "num_full_blocks",
    "block_size",
    "kv_cache_group_id",
    "block_mask",
)
"""Of ``cache_full_blocks``, which not every release gives all of these."""


class FreeContext:
    """The request whose blocks are being freed: its number + 1, or 0 where it is not known."""

    __slots__ = ("request",)

    def __init__(self) -> None:
        self.request = 0


def watch(
    pool: Any,
    number: int,
    part: Part,
    requests: Requests,
    context: FreeContext,
    settle: Callable[[], None],
    *,
    alone: bool,
    tabled: bool,
    evicts_directly: bool,
) -> None:
    """Hook the methods of one pool.

    Args:
        pool: the BlockPool, or whatever stands in its place.
        number: the pool's index in this engine.
        part: where events go.
        requests: numbers of the engine's requests.
        context: who frees, as the KVCacheManager's hooks set it.
        settle: writes at once; called after calls outside a step.
        alone: the engine has no other pool, so all blocks are this one's.
        tabled: block tables say which blocks a request has, as ``facts.is_tabled`` describes.
        evicts_directly: the model has Mamba groups, whose manager evicts through the pool's inner
            method.

    """
    if number >= MAX_POOLS:
        raise ValueError(f"more than {MAX_POOLS} block pools")
    allocating = _watch_get_new_blocks(pool, number, part, is_noted=evicts_directly)
    _watch_touch(pool, number, part)
    _watch_free_blocks(pool, number, part, context, alone, tabled)
    _watch_cache_full_blocks(pool, number, part, requests, tabled)
    _watch_rare_calls(pool, number, part, requests, settle)
    if evicts_directly:
        _watch_direct_evictions(pool, number, part, allocating)


class _Allocating:
    """Whether a call of ``get_new_blocks`` is under way, where that is asked for."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = False

    def begin(self) -> None:
        self.now = True

    def end(self, _: None) -> None:
        self.now = False


def _watch_get_new_blocks(pool: Any, number: int, part: Part, *, is_noted: bool) -> _Allocating:
    now, op, keep, layout = time.monotonic_ns, op_of(Op.ALLOCATE, number), part.keep, encode.blocks
    name, allocating = "get_new_blocks", _Allocating()

    def after(blocks: Any, _: None = None) -> None:
        try:
            keep((layout, op, now(), *blocks))
        except Exception as error:
            part.fail(name, error)

    begin, end = (allocating.begin, allocating.end) if is_noted else (None, None)
    part.on_stop(hook(pool, name, before=begin, after=after, lastly=end, given="place"))
    return allocating


def _watch_touch(pool: Any, number: int, part: Part) -> None:
    now, op, keep = time.monotonic_ns, op_of(Op.REUSE, number), part.keep

    def after(_: Any, blocks: Any) -> None:
        try:
            # vLLM 0.10.2 to 0.13 pass one list a group, the others one list.
            groups = blocks if blocks and isinstance(blocks[0], (list, tuple)) else (blocks,)
            for event in [(encode.blocks, op, now(), *group) for group in groups if group]:
                keep(event)
        except Exception as error:
            part.fail("touch", error)

    part.on_stop(hook(pool, "touch", "blocks", after=after, given="place"))


def _watch_free_blocks(
    pool: Any, number: int, part: Part, context: FreeContext, alone: bool, tabled: bool
) -> None:
    this, now, keep = reference(pool), time.monotonic_ns, part.keep

    def before(ordered_blocks: Iterable[Any]) -> tuple[Any, Any]:
        """How many blocks the request frees, or which."""
        try:
            if tabled and context.request:
                return length_hint(ordered_blocks), ordered_blocks
            return _walkable(ordered_blocks)
        except Exception as error:
            part.fail("free_blocks", error)
            return 0, ordered_blocks

    def after(_: Any, begun: Any, __: Any) -> None:
        try:
            freer = context.request
            if isinstance(begun, int):
                if begun:
                    keep((encode.once, Op.RELEASE, now(), (freer - 1, begun)))
                return
            begun = list(begun)
            if not alone:
                # vLLM hands another pool's blocks over to that pool's own free_blocks.
                begun = [block for block in begun if block.pool in (None, this())]
            _record_free(part, number, freer, begun, now())
        except Exception as error:
            part.fail("free_blocks", error)

    part.on_stop(
        hook(
            pool,
            "free_blocks",
            "ordered_blocks",
            before=before,
            after=after,
            given="place",
            exchanges=True,
        )
    )


def _walkable(blocks: Any) -> tuple[Any, Any]:
    """Blocks to look at later, and the same blocks to hand on, as an iterator where they came as
    one. Nothing is taken out of it here: what fails between would lose blocks."""
    if not isinstance(blocks, (list, tuple)) and isinstance(blocks, Iterator):
        looked_at, given = tee(blocks)
        return looked_at, given
    return blocks, blocks


def _record_free(part: Part, pool: int, freer: int, blocks: Any, now: int) -> None:
    if blocks:
        last = [block for block in blocks if block.ref_cnt <= 0]
        still_held = [block for block in blocks if block.ref_cnt > 0]
        part.keep((encode.freed, op_of(Op.FREE, pool), now, freer, last, still_held))


def _watch_cache_full_blocks(
    pool: Any, number: int, part: Part, requests: Requests, tabled: bool
) -> None:
    name = "cache_full_blocks"
    now, index, keep = time.monotonic_ns, requests.index, part.keep
    layout, op = encode.cached, Op.CACHE

    def by_table(_: Any, request: Any, first: int, last: int) -> None:
        try:
            if first < last:
                number, hashes = index[request.request_id], request.block_hashes
                keep((layout, op, now(), number, hashes, first, last))
        except Exception as error:
            part.fail(name, error)

    def by_list(_: Any, *values: Any) -> None:
        try:
            given = dict(zip(_CACHED, values, strict=True))
            if given["num_cached_blocks"] < given["num_full_blocks"]:
                _record_cached(part, number, index[given["request"].request_id], given, now())
        except Exception as error:
            part.fail(name, error)

    if tabled:
        wanted = "request", "num_cached_blocks", "num_full_blocks"
        part.on_stop(hook(pool, name, *wanted, after=by_table, given="name"))
    else:
        part.on_stop(hook(pool, name, *_CACHED, after=by_list))


def _record_cached(part: Part, pool: int, request: int, given: dict[str, Any], now: int) -> None:
    """Record a call of ``cache_full_blocks`` with these arguments."""
    first, size = given["num_cached_blocks"], given["block_size"]
    blocks = given["blocks"][first : given["num_full_blocks"]]
    hashes = [hash_bytes(block.block_hash) for block in blocks]
    mask = given["block_mask"]
    if mask is None and None not in hashes:
        lists = [(first, blocks, hashes)]
    else:
        # Sparse groups keep only some blocks: the others are null, or masked out.
        lists = [
            (first + at, [block], [hashes[at]])
            for at, block in enumerate(blocks)
            if hashes[at] is not None and not block.is_null and (mask is None or mask[at])
        ]
    group, op = given["kv_cache_group_id"] or 0, op_of(Op.CACHE_LIST, pool)
    for at, listed, their_hashes in lists:
        numbers = request, group, (at + 1) * size, size
        part.keep((encode.cached_list, op, now, numbers, listed, their_hashes))


def _watch_rare_calls(
    pool: Any,
    number: int,
    part: Part,
    requests: Requests,
    settle: Callable[[], None],
) -> None:
    now, keep = time.monotonic_ns, part.keep

    def after_evict_blocks(_: Any, cached: list[int]) -> None:
        if cached:
            # A request may hold such a block: its block table no longer says its contents.
            requests.record_hashes()
            _record_evicted(part, number, cached)
            settle()

    def cached_among(block_ids: Iterable[int]) -> list[int]:
        return [i for i in block_ids if pool_of().blocks[i].block_hash is not None]

    pool_of = reference(pool)
    _around(pool, part, "evict_blocks", ["block_ids"], cached_among, after_evict_blocks)

    def after_reset(done: Any, _: None) -> None:
        keep((encode.once, op_of(Op.RESET, number), now(), (int(bool(done)),)))
        settle()

    _around(pool, part, "reset_prefix_cache", [], lambda: None, after_reset)

    def after_unpin(_: Any, blocks: Iterable[Any]) -> None:
        _record_free(part, number, 0, list(blocks), now())

    _around(pool, part, "unpin_blocks", ["blocks"], _walkable, after_unpin, exchanges=True)

    def hash_before(request: Any, block: Any, tokens: int, group: int) -> tuple[Any, ...]:
        return request.request_id, block, tokens, group, block.block_hash

    def after_partial(_: Any, begun: tuple[Any, ...]) -> None:
        request_id, block, tokens, group, before = begun
        block_hash = block.block_hash
        # A second entry for a block makes nothing findable that was not.
        if block_hash not in (None, before):
            numbers = requests.index[request_id], group, tokens, tokens
            op = op_of(Op.CACHE_LIST, number)
            keep((encode.cached_list, op, now(), numbers, [block], [block_hash]))

    partial = ["request", "block", "num_tokens", "kv_cache_group_id"]
    _around(pool, part, "cache_partial_block", partial, hash_before, after_partial)

    def after_move(_: Any, pair: tuple[int, int]) -> None:
        keep((encode.once, op_of(Op.MOVE, number), now(), pair))

    def ids_of(source: Any, target: Any) -> tuple[int, int]:
        return source.block_id, target.block_id

    _around(pool, part, "move_block_hashes", ["src_block", "dst_block"], ids_of, after_move)


def _watch_direct_evictions(pool: Any, number: int, part: Part, allocating: _Allocating) -> None:
    def cached_id(block: Any) -> list[int]:
        return [] if allocating.now or block.block_hash is None else [block.block_id]

    def after(_: Any, cached: list[int]) -> None:
        if cached:
            _record_evicted(part, number, cached)

    name = "_maybe_evict_cached_block"
    require_method(pool, name)
    _around(pool, part, name, ["block"], cached_id, after)


def _record_evicted(part: Part, pool: int, block_ids: list[int]) -> None:
    part.keep((encode.evicted, op_of(Op.EVICT, pool), time.monotonic_ns(), block_ids))


def _around(
    pool: Any,
    part: Part,
    name: str,
    arguments: list[str],
    before: Callable[..., Any],
    after: Callable[[Any, Any], None],
    *,
    exchanges: bool = False,
) -> None:
    """Hook a rare method, where this release has it: ``after(result, before(*arguments))``."""
    if not has_method(pool, name):
        return

    def begin(*values: Any) -> Any:
        try:
            return before(*values)
        except Exception as error:
            part.fail(name, error)
            return (None, values[0]) if exchanges else None

    def end(result: Any, begun: Any, *_: Any) -> None:
        try:
            after(result, begun)
        except Exception as error:
            part.fail(name, error)

    part.on_stop(hook(pool, name, *arguments, before=begin, after=end, exchanges=exchanges))
