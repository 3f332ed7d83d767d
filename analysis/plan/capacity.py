# SPDX-License-Identifier: Apache-2.0
"""How many blocks does that make, and how many sequences fit?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.errors import RuleError
from analysis.plan.groups import Group, Grouping, Layout
from analysis.plan.model import Attention, Model
from analysis.plan.settings import Settings
from analysis.plan.specs import asked_block_size, kv_element_bytes, stages, without_windows
from analysis.plan.weights import Weights

UTILIZATIONS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95)
BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Memory:
    """A GPU's memory, in bytes, on the stage of the pipeline that decides.

    ``requested_bytes``: gpu_memory_utilization of ``gpu_bytes``. ``weight_bytes`` and
    ``other_bytes`` (activations, graphs, what torch does not allocate) go from it; ``kv_bytes``
    are left, negative where it is not enough. ``stage``: counted from 0.
    """

    stage: int
    gpu_bytes: int
    requested_bytes: int
    weight_bytes: int
    other_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Pool:
    """``blocks`` of the pool, the null block among them, which no sequence gets. ``tokens`` and
    ``max_concurrency`` are what vLLM prints at start-up: for sequences of ``max_model_len``
    tokens, by all blocks. ``longest``: tokens of the longest sequence that fits. ``kv_bytes``:
    what the blocks take on the GPU with the largest ones."""

    blocks: int
    tokens: int
    max_concurrency: float
    longest: int
    kv_bytes: int


@dataclass(frozen=True)
class Length:
    """A sequence of ``tokens``: ``blocks`` of the pool that it holds at most, ``kv_bytes`` that
    they take on each GPU (the one with the largest blocks), ``last_block_used``: the share of its
    last block that it fills, None where no layer keeps all tokens; ``sequences``: so many fit at
    once by all blocks, as vLLM counts them; ``users``: whole ones, the null block left out; both
    None where the pool is not known."""

    tokens: int
    blocks: int
    kv_bytes: int
    last_block_used: float | None
    sequences: float | None
    users: int | None


@dataclass(frozen=True)
class ByUtilization:
    """The pool at another ``gpu_memory_utilization``; None where the weights alone take more."""

    gpu_memory_utilization: float
    kv_bytes: int
    pool: Pool | None


@dataclass(frozen=True)
class ByBlockSize:
    """The pool and a sequence of ``length.tokens`` with another ``block_size``; ``effective``:
    the tokens of a block that vLLM makes of it, more where a model keeps states."""

    block_size: int
    effective: int
    bytes_per_block: int
    blocks: int | None
    length: Length


def lay_out(model: Model, settings: Settings, grouping: Grouping) -> Layout:
    """The groups and what a block takes."""
    found = stages(model, settings)
    return grouping(found if settings.hybrid else without_windows(found))


def bytes_per_token(model: Model, settings: Settings, *, growing: bool = False) -> int:
    """Bytes that all layers together keep of a token, on all GPUs that share them.

    Args:
        model: the model.
        settings: the settings.
        growing: only of layers that keep every token, however long the sequence gets.

    """
    width = kv_element_bytes(model, settings)
    return sum(
        layer.kv_heads * (layer.head_size + layer.value_size) * width
        for layer in model.cached
        if isinstance(layer, Attention) and not (growing and layer.window)
    )


def max_model_len(model: Model, settings: Settings) -> int:
    """Tokens of the longest sequence that is served.

    Raises:
        RuleError: neither the model nor a setting tells.

    """
    length = settings.max_model_len or model.max_model_len
    if length is None:
        raise RuleError(f"{model.name} does not tell its longest sequence; give --max-model-len")
    return length


def memory(settings: Settings, weights: Weights | None, layout: Layout) -> Memory | None:
    """The GPU's memory on the stage that makes the fewest blocks; None where it is not known."""
    if settings.gpu_bytes is None or weights is None:
        return None
    # As vLLM's request_memory.
    requested = math.ceil(settings.gpu_bytes * settings.gpu_memory_utilization)
    found = [
        Memory(
            stage=stage,
            gpu_bytes=settings.gpu_bytes,
            requested_bytes=requested,
            weight_bytes=taken,
            other_bytes=settings.other_bytes,
            kv_bytes=requested - taken - settings.other_bytes,
        )
        for stage, taken in enumerate(weights.stage_bytes)
    ]
    return min(found, key=lambda one: one.kv_bytes // layout.bytes_per_block[one.stage])


def blocks_of(settings: Settings, left: Memory | None, layout: Layout) -> int | None:
    """The blocks of the pool; None where nothing tells."""
    if settings.blocks is not None:
        return settings.blocks
    if settings.kv_bytes is not None:
        return min(settings.kv_bytes // size for size in layout.bytes_per_block)
    if left is None:
        return None
    return max(0, left.kv_bytes // layout.bytes_per_block[left.stage])


def pool(blocks: int, model: Model, settings: Settings, layout: Layout) -> Pool:
    """What vLLM makes of so many blocks (``get_kv_cache_capacity``)."""
    longest = max_model_len(model, settings)
    needed = layout.blocks(longest, settings.in_flight_tokens)
    concurrency = blocks / needed
    return Pool(
        blocks=blocks,
        tokens=int(concurrency * longest),
        max_concurrency=concurrency,
        longest=_longest(blocks - 1, longest, settings, layout),
        kv_bytes=blocks * max(layout.bytes_per_block),
    )


def _longest(usable: int, most: int, settings: Settings, layout: Layout) -> int:
    """The tokens of the longest sequence that so many blocks hold."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if layout.blocks(middle, settings.in_flight_tokens) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def length(tokens: int, blocks: int | None, settings: Settings, layout: Layout) -> Length:
    """What a sequence of so many tokens takes."""
    held = layout.blocks(tokens, settings.in_flight_tokens)
    return Length(
        tokens=tokens,
        blocks=held,
        kv_bytes=held * max(layout.bytes_per_block),
        last_block_used=_last_block_used(tokens, layout.groups),
        sequences=None if blocks is None else blocks / held,
        users=None if blocks is None else max(0, blocks - 1) // held,
    )


def _last_block_used(tokens: int, groups: Sequence[Group]) -> float | None:
    size = next((group.block_size for group in groups if group.token_bytes and not group.window), 0)
    return ((tokens - 1) % size + 1) / size if size else None


def lengths(most: int, given: Sequence[int]) -> list[int]:
    """Lengths worth a row: powers of two up to the longest, it, and those given."""
    steps = [1 << power for power in range(9, 24) if 1 << power < most]
    return sorted({*steps[-8:], most, *given})


def by_utilization(
    model: Model, settings: Settings, weights: Weights | None, layout: Layout
) -> Iterator[ByUtilization]:
    """The pool at other shares of the GPU's memory."""
    if settings.gpu_bytes is None or settings.blocks is not None or settings.kv_bytes is not None:
        return
    for share in sorted({*UTILIZATIONS, settings.gpu_memory_utilization}):
        there = replace(settings, gpu_memory_utilization=share)
        left = memory(there, weights, layout)
        if left is not None:
            count = blocks_of(there, left, layout) or 0
            made = pool(count, model, there, layout) if count else None
            yield ByUtilization(share, left.kv_bytes, made)


def by_block_size(
    tokens: int, model: Model, settings: Settings, weights: Weights | None, grouping: Grouping
) -> Iterator[ByBlockSize]:
    """The pool and a sequence of so many tokens with blocks of other sizes."""
    asked = asked_block_size(model, settings)
    for size in sorted({*BLOCK_SIZES, asked}):
        there = replace(settings, block_size=size)
        if asked_block_size(model, there) != size:
            continue
        if settings.blocks is not None and size != asked:
            continue
        try:
            layout = lay_out(model, there, grouping)
        except RuleError:
            # With the size that was asked for it could be done, so this size is what is refused.
            continue
        count = blocks_of(there, memory(there, weights, layout), layout)
        yield ByBlockSize(
            block_size=size,
            effective=max(
                (group.block_size for group in layout.groups if group.token_bytes), default=size
            ),
            bytes_per_block=max(layout.bytes_per_block),
            blocks=count,
            length=length(tokens, count, there, layout),
        )
