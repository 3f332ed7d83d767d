# SPDX-License-Identifier: Apache-2.0
"""By how much do a plan's figures differ from the engine's, and which figures cause that?

The difference in blocks is taken apart. Each figure that the plan computed the blocks from is
replaced by the engine's, one after the other; what a replacement changes is that figure's
contribution. The rest is a contribution of its own, which nothing explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.gpu.memory import StartUp
from analysis.plan import Plan, capacity
from analysis.plan.capacity import Memory, Pool
from analysis.plan.groups import Layout
from analysis.plan.model import Model
from analysis.tables.facts import Facts

SAME = 0.02
"""No difference up to this share of the prediction is taken apart."""


@dataclass(frozen=True)
class Contribution:
    """What one figure contributes to a difference. ``amount``: measured less predicted, in the
    difference's unit. ``explained``: False where no figure accounts for the amount."""

    name: str
    amount: float
    note: str
    explained: bool = True


@dataclass(frozen=True)
class Figure:
    """One figure of the plan beside the engine's.

    ``predicted`` and ``measured``: in ``unit``, None where not known. ``difference``: measured
    less predicted, as a share of ``predicted``. ``parts``: the contributions that add up to the
    difference; none where it is 2 % or less.
    """

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    difference: float | None
    parts: tuple[Contribution, ...]


def figures(
    model: Model,
    plan: Plan,
    facts: Facts,
    start_up: StartUp | None,
    *,
    has_weights: bool,
    given: bool,
) -> Iterator[Figure]:
    """The figures in the order of the arithmetic.

    Args:
        model: the model.
        plan: the plan.
        facts: what the session records of the engine.
        start_up: the engine's memory at start-up, None where the session does not record it.
        has_weights: whether the plan predicted the weights.
        given: whether the plan took the number of blocks from the session.

    """
    block = max(plan.layout.bytes_per_block)
    yield _figure("A block of the pool", "bytes", block, facts.bytes_per_block, ())
    if start_up is not None and plan.memory is not None:
        yield _figure(
            "Memory asked for", "bytes", plan.memory.requested_bytes, start_up.requested_bytes, ()
        )
        if has_weights:
            yield _weights(plan, plan.memory, start_up)
        parts = tuple(_memory(plan.memory, start_up))
        yield _figure(
            "Left for the KV cache", "bytes", plan.memory.kv_bytes, start_up.kv_bytes, parts
        )
    if plan.pool is None or not facts.pool_blocks:
        return
    if not given:
        parts = tuple(_blocks(plan, facts, start_up))
        yield _figure("Blocks", "blocks", plan.pool.blocks, facts.pool_blocks, parts)
    real = capacity.pool(facts.pool_blocks, model, plan.settings, plan.layout)
    yield _tokens(plan.pool, real, facts, plan.layout)
    yield _concurrency(plan.pool, real, facts)


def _figure(
    name: str, unit: str, predicted: float, measured: float | None, parts: Sequence[Contribution]
) -> Figure:
    """The figure, with its contributions where the difference is large enough."""
    if measured is None or predicted <= 0:
        return Figure(name, unit, predicted, measured, None, ())
    gap = measured - predicted
    difference = gap / predicted
    if abs(difference) <= SAME:
        return Figure(name, unit, predicted, measured, difference, ())
    kept = [one for one in parts if one.amount]
    rest = gap - sum(one.amount for one in kept)
    if abs(rest) > SAME * predicted:
        why = "no figure of the session accounts for it"
        kept.append(Contribution("Not explained", rest, why, explained=False))
    return Figure(name, unit, predicted, measured, difference, tuple(kept))


def _weights(plan: Plan, memory: Memory, start_up: StartUp) -> Figure:
    measured = start_up.weights_bytes
    parts = []
    if measured is not None and plan.weights is not None:
        why = (
            "the plan's are an estimate from config.json"
            if plan.weights.is_estimate
            else f"the plan's are from {plan.weights.source}"
        )
        gap = measured - memory.weight_bytes
        parts.append(Contribution("Weights", gap, why, explained=plan.weights.is_estimate))
    return _figure("Weights", "bytes", memory.weight_bytes, measured, parts)


def _memory(memory: Memory, start_up: StartUp) -> Iterator[Contribution]:
    """The contributions to the memory left for the KV cache, in bytes."""
    yield from _asked_and_weights(memory, start_up)
    if memory.other_bytes:
        yield Contribution("--other-memory", memory.other_bytes, "planned for the figures below")
    yield Contribution(
        "Activations", -(start_up.activation_bytes or 0), "at the peak of a trial run"
    )
    yield Contribution(
        "Not by torch", -(start_up.non_torch_bytes or 0), "CUDA, NCCL and other libraries"
    )
    if start_up.graphs_estimate_applied:
        yield Contribution(
            "CUDA graphs",
            -(start_up.graphs_estimated_bytes or 0),
            "estimated before they are captured",
        )
    if start_up.unexplained_bytes:
        yield Contribution(
            "Does not add up",
            -start_up.unexplained_bytes,
            "vLLM left another amount than its own figures leave",
            explained=False,
        )


def _asked_and_weights(memory: Memory, start_up: StartUp) -> Iterator[Contribution]:
    """The contributions that need no measurement of vLLM's, in bytes: the memory that it asks for,
    and the weights."""
    if start_up.requested_bytes is not None:
        gap = start_up.requested_bytes - memory.requested_bytes
        yield Contribution("Memory asked for", gap, "gpu_memory_utilization of the GPU")
    if start_up.weights_bytes is not None:
        gap = memory.weight_bytes - start_up.weights_bytes
        yield Contribution("Weights", gap, "planned, less loaded")


def _blocks(plan: Plan, facts: Facts, start_up: StartUp | None) -> Iterator[Contribution]:
    """The contributions to the number of blocks."""
    measured, memory = facts.pool_blocks or 0, plan.memory
    if start_up is None or memory is None or plan.pool is None:
        return
    block = plan.layout.bytes_per_block[memory.stage]
    if start_up.kv_bytes is None:
        if start_up.activation_bytes is None:
            yield from _not_measured(measured - plan.pool.blocks, memory, start_up, block)
        return
    for one in _memory(memory, start_up):
        yield replace(one, amount=one.amount / block)
    real = facts.bytes_per_block or block
    yield Contribution(
        "A block's size",
        start_up.kv_bytes / real - start_up.kv_bytes / block,
        f"{real:,} bytes, where {block:,} were planned",
    )
    fitting = start_up.kv_bytes // real
    if measured != fitting:
        why = _cap(facts, fitting, plan.settings.pipeline_parallel)
        yield Contribution("The number of blocks", measured - fitting, why)


def _not_measured(
    gap: int, memory: Memory, start_up: StartUp, block: int
) -> Iterator[Contribution]:
    """The contributions to the number of blocks where vLLM did not measure the memory left."""
    known = [
        replace(one, amount=one.amount / block) for one in _asked_and_weights(memory, start_up)
    ]
    yield from known
    yield Contribution(
        "The KV cache's memory",
        gap - sum(one.amount for one in known),
        "vLLM does not measure what is left where kv_cache_memory_bytes is given",
    )


def _cap(facts: Facts, fitting: int, stages: int) -> str:
    """Why vLLM made another number of blocks than fit in the memory of the worker with the least
    left."""
    made = f"{facts.pool_blocks or 0:,} blocks were made where {fitting:,} fit"
    if facts.blocks_override:
        return f"{made}: --num-gpu-blocks-override {facts.blocks_override} does that"
    if stages == 1:
        return f"{made}: num_gpu_blocks_override does that"
    return f"{made}: num_gpu_blocks_override, or a stage with larger blocks, does that"


def _tokens(planned: Pool, real: Pool, facts: Facts, layout: Layout) -> Figure:
    """The tokens in the cache. ``real``: the plan's pool with the engine's number of blocks."""
    parts = [Contribution("Blocks", real.tokens - planned.tokens, "as above")]
    plain = _tokens_by_block_size(real.blocks, layout)
    if facts.kv_tokens is not None and facts.kv_tokens == plain != real.tokens:
        formula = "this release counts blocks x block size / groups"
        parts.append(Contribution("Another formula", plain - real.tokens, formula))
    return _figure("Tokens in the cache", "tokens", planned.tokens, facts.kv_tokens, parts)


def _tokens_by_block_size(blocks: int, layout: Layout) -> int:
    size = min(one.block_size for one in layout.groups)
    return blocks * size // len(layout.groups)


def _concurrency(planned: Pool, real: Pool, facts: Facts) -> Figure:
    gap = real.max_concurrency - planned.max_concurrency
    return _figure(
        f"Sequences of {facts.max_model_len or 0:,} tokens at once",
        "sequences",
        planned.max_concurrency,
        facts.max_concurrency,
        [Contribution("Blocks", gap, "as above")],
    )
