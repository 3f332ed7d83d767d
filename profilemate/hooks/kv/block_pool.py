# SPDX-License-Identifier: Apache-2.0
"""Record what happens to the blocks of one pool.

No call that profilemate touches is hotter than four of these. Their hooks keep one tuple and do
nothing else. A failure of ours ends the recording of blocks and never reaches vLLM.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from operator import length_hint
from typing import Any

from profilemate.format.events import MAX_POOLS, Op, op_of
from profilemate.hooks.instances import followed, own_method, put, reference, required_method
from profilemate.hooks.kv.requests import Requests, hash_bytes
from profilemate.hooks.parts import Part
from profilemate.record import encode

_PARTIAL = ("request", "block", "num_tokens", "kv_cache_group_id")


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
    _watch_get_new_blocks(pool, number, part)
    _watch_touch(pool, number, part)
    _watch_free_blocks(pool, number, part, context, alone, tabled)
    _watch_cache_full_blocks(pool, number, part, requests, tabled)
    _watch_rare_calls(pool, number, part, requests, settle)
    if evicts_directly:
        _watch_direct_evictions(pool, number, part)


def _watch_get_new_blocks(pool: Any, number: int, part: Part) -> None:
    original, this = required_method(pool, "get_new_blocks"), reference(pool)
    now, op, keep, layout = time.monotonic_ns, op_of(Op.ALLOCATE, number), part.keep, encode.blocks

    def get_new_blocks(num_blocks: int) -> Any:
        blocks = original(this(), num_blocks)
        try:
            keep((layout, op, now(), *blocks))
        except Exception as error:
            part.fail("get_new_blocks", error)
        return blocks

    part.on_stop(put(pool, "get_new_blocks", get_new_blocks))


def _watch_touch(pool: Any, number: int, part: Part) -> None:
    original, this = required_method(pool, "touch"), reference(pool)
    now, op, keep = time.monotonic_ns, op_of(Op.REUSE, number), part.keep

    def touch(blocks: Any) -> Any:
        result = original(this(), blocks)
        try:
            # vLLM 0.10.2 to 0.13 pass one list a group, the others one list.
            groups = blocks if blocks and isinstance(blocks[0], (list, tuple)) else (blocks,)
            for event in [(encode.blocks, op, now(), *group) for group in groups if group]:
                keep(event)
        except Exception as error:
            part.fail("touch", error)
        return result

    part.on_stop(put(pool, "touch", touch))


def _watch_free_blocks(
    pool: Any, number: int, part: Part, context: FreeContext, alone: bool, tabled: bool
) -> None:
    original, this = required_method(pool, "free_blocks"), reference(pool)
    now, keep = time.monotonic_ns, part.keep

    # vLLM 0.23 also says at which end of the queue they go.
    def free_blocks(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        freer = context.request
        if tabled and freer:
            try:
                count = length_hint(ordered_blocks)
            except Exception as error:
                part.fail("free_blocks", error)
                count = 0
            result = original(this(), ordered_blocks, *args, **kwargs)
            try:
                if count:
                    keep((encode.once, Op.RELEASE, now(), (freer - 1, count)))
            except Exception as error:
                part.fail("free_blocks", error)
            return result
        try:
            blocks, given = _walkable(ordered_blocks)
        except Exception as error:
            part.fail("free_blocks", error)
            return original(this(), ordered_blocks, *args, **kwargs)
        result = original(this(), given, *args, **kwargs)
        try:
            if not alone:
                # vLLM hands another pool's blocks over to that pool's own free_blocks.
                blocks = [block for block in blocks if block.pool in (None, this())]
            _record_free(part, number, freer, blocks, now())
        except Exception as error:
            part.fail("free_blocks", error)
        return result

    part.on_stop(put(pool, "free_blocks", free_blocks))


def _walkable(blocks: Iterable[Any]) -> tuple[Any, Any]:
    """Blocks to look at, and the same blocks to hand on, as an iterator where they came as one."""
    if isinstance(blocks, (list, tuple)):
        return blocks, blocks
    listed = list(blocks)
    return listed, iter(listed)


def _record_free(part: Part, pool: int, freer: int, blocks: Any, now: int) -> None:
    if blocks:
        last = [block for block in blocks if block.ref_cnt <= 0]
        still_held = [block for block in blocks if block.ref_cnt > 0]
        part.keep((encode.freed, op_of(Op.FREE, pool), now, freer, last, still_held))


def _watch_cache_full_blocks(
    pool: Any, number: int, part: Part, requests: Requests, tabled: bool
) -> None:
    original, this = required_method(pool, "cache_full_blocks"), reference(pool)
    names = list(inspect.signature(original).parameters)[1:]
    now, index, keep = time.monotonic_ns, requests.index, part.keep
    layout, op = encode.cached, Op.CACHE

    def by_table(_: Any, request: Any, first: int, last: int) -> None:
        try:
            if first < last:
                number, hashes = index[request.request_id], request.block_hashes
                keep((layout, op, now(), number, hashes, first, last))
        except Exception as error:
            part.fail("cache_full_blocks", error)

    def by_list(*args: Any, **kwargs: Any) -> Any:
        result = original(this(), *args, **kwargs)
        try:
            given = dict(zip(names, args, strict=False), **kwargs) if args else kwargs
            if given["num_cached_blocks"] < given["num_full_blocks"]:
                _record_cached(part, number, index[given["request"].request_id], given, now())
        except Exception as error:
            part.fail("cache_full_blocks", error)
        return result

    hook: Callable[..., Any] = by_list
    if tabled and names[:4] == ["request", "blocks", "num_cached_blocks", "num_full_blocks"]:
        wanted = "request", "num_cached_blocks", "num_full_blocks"
        hook = followed(pool, "cache_full_blocks", original, by_table, *wanted)
    part.on_stop(put(pool, "cache_full_blocks", hook))


def _record_cached(part: Part, pool: int, request: int, given: dict[str, Any], now: int) -> None:
    """Record a call of ``cache_full_blocks`` with these arguments."""
    first, size = given["num_cached_blocks"], given["block_size"]
    blocks = given["blocks"][first : given["num_full_blocks"]]
    hashes = [hash_bytes(block.block_hash) for block in blocks]
    mask = given.get("block_mask")
    if mask is None and None not in hashes:
        lists = [(first, blocks, hashes)]
    else:
        # Sparse groups keep only some blocks: the others are null, or masked out.
        lists = [
            (first + at, [block], [hashes[at]])
            for at, block in enumerate(blocks)
            if hashes[at] is not None and not block.is_null and (mask is None or mask[at])
        ]
    group, op = given.get("kv_cache_group_id", 0), op_of(Op.CACHE_LIST, pool)
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

    def after_evict_blocks(cached: list[int], result: Any) -> None:
        if cached:
            # A request may hold such a block: its block table no longer says its contents.
            requests.record_hashes()
            _record_evicted(part, number, cached)
            settle()

    def cached_among(block_ids: Iterable[int]) -> list[int]:
        return [i for i in block_ids if pool_of().blocks[i].block_hash is not None]

    pool_of = reference(pool)
    _around(pool, part, "evict_blocks", cached_among, after_evict_blocks)

    def after_reset(_: None, done: Any) -> None:
        keep((encode.once, op_of(Op.RESET, number), now(), (int(bool(done)),)))
        settle()

    _around(pool, part, "reset_prefix_cache", lambda *_, **__: None, after_reset)

    def after_unpin(blocks: list[Any], result: Any) -> None:
        _record_free(part, number, 0, blocks, now())

    _around_iterable(pool, part, "unpin_blocks", after_unpin)

    def before_partial(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        given = dict(zip(_PARTIAL, args, strict=False)) | kwargs
        return given, given["block"].block_hash

    def after_partial(begun: tuple[dict[str, Any], Any], _: Any) -> None:
        given, before = begun
        block_hash = given["block"].block_hash
        # A second entry for a block makes nothing findable that was not.
        if block_hash not in (None, before):
            tokens = given["num_tokens"]
            request = requests.index[given["request"].request_id]
            numbers = request, given["kv_cache_group_id"], tokens, tokens
            op, listed = op_of(Op.CACHE_LIST, number), [given["block"]]
            keep((encode.cached_list, op, now(), numbers, listed, [block_hash]))

    _around(pool, part, "cache_partial_block", before_partial, after_partial)

    def after_move(pair: tuple[int, int], result: Any) -> None:
        keep((encode.once, op_of(Op.MOVE, number), now(), pair))

    def ids_of(src_block: Any, dst_block: Any) -> tuple[int, int]:
        return src_block.block_id, dst_block.block_id

    _around(pool, part, "move_block_hashes", ids_of, after_move)


def _watch_direct_evictions(pool: Any, number: int, part: Part) -> None:
    allocate = vars(pool)["get_new_blocks"]
    allocating = False

    def get_new_blocks(num_blocks: int) -> Any:
        nonlocal allocating
        allocating = True
        try:
            return allocate(num_blocks)
        finally:
            allocating = False

    part.on_stop(put(pool, "get_new_blocks", get_new_blocks))

    def cached_id(block: Any) -> list[int]:
        return [] if allocating or block.block_hash is None else [block.block_id]

    def after(cached: list[int], result: Any) -> None:
        if cached:
            _record_evicted(part, number, cached)

    required_method(pool, "_maybe_evict_cached_block")
    _around(pool, part, "_maybe_evict_cached_block", cached_id, after)


def _record_evicted(part: Part, pool: int, block_ids: list[int]) -> None:
    part.keep((encode.evicted, op_of(Op.EVICT, pool), time.monotonic_ns(), block_ids))


def _around(
    pool: Any,
    part: Part,
    name: str,
    before: Callable[..., Any],
    after: Callable[[Any, Any], None],
) -> None:
    """Hook a rare method, where this release has it: ``after(before(*args), result)``."""
    original, this = own_method(pool, name), reference(pool)
    if original is None:
        return

    def hooked(*args: Any, **kwargs: Any) -> Any:
        try:
            begun = before(*args, **kwargs)
        except Exception as error:
            part.fail(name, error)
            return original(this(), *args, **kwargs)
        result = original(this(), *args, **kwargs)
        try:
            after(begun, result)
        except Exception as error:
            part.fail(name, error)
        return result

    part.on_stop(put(pool, name, hooked))


def _around_iterable(
    pool: Any, part: Part, name: str, after: Callable[[list[Any], Any], None]
) -> None:
    """Hook a rare method whose first argument may be an iterator of blocks."""
    original, this = own_method(pool, name), reference(pool)
    if original is None:
        return

    def hooked(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            listed, given = _walkable(blocks)
        except Exception as error:
            part.fail(name, error)
            return original(this(), blocks, *args, **kwargs)
        result = original(this(), given, *args, **kwargs)
        try:
            after(listed, result)
        except Exception as error:
            part.fail(name, error)
        return result

    part.on_stop(put(pool, name, hooked))
