# SPDX-License-Identifier: Apache-2.0
"""How many blocks does the memory make, and how many sequences fit?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.errors import RuleError
from analysis.plan.groups import Group, Grouping, Layout
from analysis.plan.model import Attention, Model
from analysis.plan.settings import Settings
from analysis.plan.specs import (
    asked_block_size,
    kv_element_bytes,
    max_model_len,
    stages,
    without_windows,
)
from analysis.plan.weights import Weights

UTILIZATIONS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95)
BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Memory:
    """The memory of one GPU, in bytes, on the pipeline stage that makes the fewest blocks.

    ``stage``: its number, from 0. ``requested_bytes``: the share ``gpu_memory_utilization`` of
    ``gpu_bytes``. ``kv_bytes``: what is left of it after ``weight_bytes`` and ``other_bytes``
    (activations, CUDA graphs, what torch does not allocate); negative where these take more.
    """

    stage: int
    gpu_bytes: int
    requested_bytes: int
    weight_bytes: int
    other_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Pool:
    """The pool.

    ``blocks``: all blocks, the null block included, which no sequence gets. ``tokens`` and
    ``max_concurrency``: as vLLM prints them at start-up, from all blocks and for sequences of
    ``max_model_len`` tokens. ``longest``: tokens of the longest sequence that fits. ``kv_bytes``:
    bytes of all blocks on the GPU with the largest blocks.
    """

    blocks: int
    tokens: int
    max_concurrency: float
    longest: int
    kv_bytes: int


@dataclass(frozen=True)
class Length:
    """A sequence of ``tokens`` tokens.

    ``blocks``: blocks of the pool that it holds at most. ``kv_bytes``: bytes of these blocks on
    the GPU with the largest blocks. ``last_block_used``: the share of its last block that it
    fills, None where no layer keeps all tokens. ``sequences``: how many such sequences fit at
    once, as vLLM counts them from all blocks. ``users``: how many whole ones fit without the null
    block. Both are None where the pool is not known.
    """

    tokens: int
    blocks: int
    kv_bytes: int
    last_block_used: float | None
    sequences: float | None
    users: int | None


@dataclass(frozen=True)
class ByUtilization:
    """The pool at this ``gpu_memory_utilization``. ``kv_bytes``: bytes left for it on one GPU.
    ``pool``: None where they make no block."""

    gpu_memory_utilization: float
    kv_bytes: int
    pool: Pool | None


@dataclass(frozen=True)
class ByBlockSize:
    """The pool and a sequence with this ``block_size``, in tokens. ``effective``: the tokens of
    a block that vLLM makes then, more than ``block_size`` where a model keeps states."""

    block_size: int
    effective: int
    bytes_per_block: int
    blocks: int | None
    length: Length


def lay_out(model: Model, settings: Settings, grouping: Grouping) -> Layout:
    """The groups, and the bytes of a block.

    Raises:
        RuleError: vLLM cannot serve the model with these settings.

    """
    found = stages(model, settings)
    if not any(found):
        raise RuleError(f"no layer of {model.name} keeps anything in the KV cache: nothing to plan")
    for number, stage in enumerate(found):
        if not stage:
            raise RuleError(
                f"--pipeline-parallel-size {settings.pipeline_parallel}: no layer of stage "
                f"{number} keeps anything in the KV cache; plan with fewer stages"
            )
    return grouping(found if settings.hybrid else without_windows(found))


def bytes_per_token(model: Model, settings: Settings, *, growing: bool = False) -> int:
    """Bytes that all layers together keep of a token, on all GPUs that share them.

    Args:
        model: the model.
        settings: the settings.
        growing: count only the layers that keep every token of a sequence.

    Raises:
        RuleError: the type of the numbers in the cache is not known here.

    """
    width = kv_element_bytes(model, settings)
    return sum(
        layer.kv_heads * (layer.head_size + layer.value_size) * (layer.element_bytes or width)
        for layer in model.cached
        if isinstance(layer, Attention) and not (growing and layer.window)
    )


def memory(settings: Settings, weights: Weights | None, layout: Layout) -> Memory | None:
    """The memory of one GPU, in bytes, on the stage that makes the fewest blocks; None where the
    GPU or the weights are not known."""
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


def blocks_of(settings: Settings, memory: Memory | None, layout: Layout) -> int | None:
    """The number of blocks of the pool; None where neither a setting nor the memory gives it."""
    if settings.blocks is not None:
        return settings.blocks
    if settings.kv_bytes is not None:
        return min(settings.kv_bytes // size for size in layout.bytes_per_block)
    if memory is None:
        return None
    return max(0, memory.kv_bytes // layout.bytes_per_block[memory.stage])


def pool(blocks: int, model: Model, settings: Settings, layout: Layout) -> Pool:
    """The pool that vLLM makes of ``blocks`` blocks (its ``get_kv_cache_capacity``).

    Raises:
        RuleError: neither the model nor a setting says how long a sequence may be.

    """
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


def _longest(usable: int, served: int, settings: Settings, layout: Layout) -> int:
    """Tokens of the longest sequence that fits in ``usable`` blocks, at most ``served``."""
    low, high = 0, served
    while low < high:
        middle = (low + high + 1) // 2
        if layout.blocks(middle, settings.in_flight_tokens) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def length(tokens: int, blocks: int | None, settings: Settings, layout: Layout) -> Length:
    """The blocks and bytes that a sequence of ``tokens`` tokens takes, and how many such
    sequences fit in a pool of ``blocks`` blocks."""
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
    """The share of its last block that a sequence fills; None where no group keeps all tokens."""
    size = next((group.block_size for group in groups if group.token_bytes and not group.window), 0)
    return ((tokens - 1) % size + 1) / size if size else None


def lengths(longest: int, given: Sequence[int]) -> list[int]:
    """The lengths that get a row, in tokens: powers of two below the longest, the longest, and
    the lengths given."""
    powers = [1 << power for power in range(9, 24) if 1 << power < longest]
    return sorted({*powers[-8:], longest, *given})


def by_utilization(
    model: Model, settings: Settings, weights: Weights | None, layout: Layout
) -> Iterator[ByUtilization]:
    """The pool at several shares of the GPU's memory; nothing where the memory does not decide."""
    if settings.gpu_bytes is None or settings.blocks is not None or settings.kv_bytes is not None:
        return
    for share in sorted({*UTILIZATIONS, settings.gpu_memory_utilization}):
        there = replace(settings, gpu_memory_utilization=share)
        found = memory(there, weights, layout)
        if found is not None:
            count = blocks_of(there, found, layout) or 0
            made = pool(count, model, there, layout) if count else None
            yield ByUtilization(share, found.kv_bytes, made)


def by_block_size(
    tokens: int, model: Model, settings: Settings, weights: Weights | None, grouping: Grouping
) -> Iterator[ByBlockSize]:
    """The pool, and a sequence of ``tokens`` tokens, at several block sizes. Sizes that vLLM
    would refuse or replace are left out."""
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
            # The size in the settings works, so vLLM would refuse this size alone.
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
