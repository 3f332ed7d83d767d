# SPDX-License-Identifier: Apache-2.0
"""What does a pool of so many blocks need: how much memory, which setting, how many GPUs?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.gpu.memory import StartUp
    from analysis.tables.facts import Facts
    from analysis.whatif.workload import Measured

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Sizes of pools, as factors of the session's."""

_MOST_UTILIZATION = 0.97
"""The driver, and other users of the GPU, need the rest."""

_MOST_GPUS = 16
"""Largest factor by which the number of GPUs may grow."""


@dataclass(frozen=True)
class Pool:
    """A pool of ``num_blocks`` usable blocks, and what it needs.

    ``factor``: of the memory that the session's pool had, null blocks included. ``gib``: KV cache
    on each GPU, with as many GPUs as the session had. ``gpu_memory_utilization``: the setting that
    gives so many blocks on these GPUs. ``gpus``: how many GPUs an engine needs; more than it had
    only if no setting is enough. This assumes that tensor parallelism spreads weights and KV cache
    evenly, and that all else stays as it is. A figure is None where the session's workers did not
    record what it takes to compute it, or where the pool does not fit.
    """

    num_blocks: int
    factor: float | None
    gib: float | None
    gpu_memory_utilization: float | None
    gpus: int | None


def sizes(measured: Measured, block_size: int) -> tuple[int, ...]:
    """Usable blocks of pools from a quarter to sixteen times the session's memory, in blocks of
    this size; none where the session's own size is not known."""
    found = (times(measured, block_size, factor) for factor in FACTORS)
    return tuple(usable for usable in found if usable is not None)


def times(measured: Measured, block_size: int, factor: float) -> int | None:
    """Usable blocks in ``factor`` times the session's memory; None where that is not known."""
    now = _blocks_now(measured, block_size)
    return max(1, round(now * factor) - 1) if now else None


def fractions(enough: int) -> tuple[int, ...]:
    """Pools from a 64th of ``enough`` blocks up to all of them, for a trace, which has no pool."""
    return tuple(dict.fromkeys(max(1, enough >> shift) for shift in range(6, -1, -1)))


def describe(
    num_blocks: Sequence[int], measured: Measured | None, block_size: int
) -> tuple[Pool, ...]:
    """Pools of these sizes, in blocks of ``block_size`` tokens."""
    return tuple(_describe(blocks, measured, block_size) for blocks in num_blocks)


def _describe(blocks: int, measured: Measured | None, block_size: int) -> Pool:
    now = _blocks_now(measured, block_size) if measured else None
    if measured is None or now is None:
        return Pool(blocks, None, None, None, None)
    factor = (blocks + 1) / now
    of_block = measured.facts.bytes_per_block
    if of_block is None or measured.block_size is None:
        return Pool(blocks, factor, None, None, None)
    taken = (blocks + 1) * of_block * block_size / measured.block_size
    utilization = _utilization(taken, measured.start_up)
    gpus = _gpus(taken, measured.facts, measured.start_up, utilization)
    return Pool(blocks, factor, taken / 2**30, utilization, gpus)


def _blocks_now(measured: Measured, block_size: int) -> float | None:
    """The session's pool in blocks of this size, with its null block, which takes memory, too."""
    if not measured.num_blocks or not measured.block_size:
        return None
    return (measured.num_blocks + 1) * measured.block_size / block_size


def _utilization(taken: float, start_up: StartUp | None) -> float | None:
    """The setting is the share of the GPU's memory that vLLM may take for everything."""
    if start_up is None or not start_up.total_bytes:
        return None
    if start_up.requested_bytes is None or start_up.kv_bytes is None:
        return None
    else_taken = start_up.requested_bytes - start_up.kv_bytes
    share = (else_taken + taken) / start_up.total_bytes
    return share if share <= _MOST_UTILIZATION else None


def _gpus(
    taken: float, facts: Facts, start_up: StartUp | None, utilization: float | None
) -> int | None:
    now = (facts.tensor_parallel or 1) * (facts.pipeline_parallel or 1)
    if utilization is not None:
        return now
    if start_up is None or start_up.requested_bytes is None or start_up.kv_bytes is None:
        return None
    if start_up.weights_bytes is None:
        return None
    fixed = start_up.requested_bytes - start_up.kv_bytes - start_up.weights_bytes
    spread = start_up.weights_bytes + taken
    times = 2
    while times <= _MOST_GPUS:
        if fixed + spread / times <= start_up.requested_bytes:
            return now * times
        times *= 2
    return None
