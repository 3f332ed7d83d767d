# SPDX-License-Identifier: Apache-2.0
"""Where did the plan and the engine differ, and what of it comes from what?

The plan is made from the model and the settings alone. The blocks' difference is then taken
apart: each figure that went into it is replaced by the one that the engine found, one after the
other, and what each replacement changes is that figure's part. What is left over is named so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.errors import RuleError, SessionError
from analysis.gpu.memory import StartUp, measure
from analysis.plan import Plan, capacity, config, local, plan, platforms
from analysis.plan.capacity import Memory, Pool
from analysis.plan.groups import Grouping, Layout, group
from analysis.plan.model import Attention, Model, State
from analysis.plan.settings import Settings
from analysis.plan.specs import block_size
from analysis.tables import facts as session_facts
from analysis.tables.facts import Facts
from analysis.tables.metadata import flag, part, text, whole
from analysis.tables.session import Session

SAME = 0.02
"""A difference of no more than this share is not worth explaining."""


@dataclass(frozen=True)
class Part:
    """What one figure does to a prediction: ``amount`` in the prediction's unit, measured less
    predicted; ``explained``: False for what no figure accounts for."""

    name: str
    amount: float
    note: str
    explained: bool = True


@dataclass(frozen=True)
class Figure:
    """One figure of the plan beside the engine's, both in ``unit``; None where not known.
    ``difference``: measured less predicted, as a share of what was predicted. ``parts``: what it
    comes from where it is over 2 %; they add up to it."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    difference: float | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Reality:
    """A plan beside the session that it is of. ``session``: its id; ``figures``: in the order of
    the arithmetic; ``notes``: what the session does not tell."""

    session: str
    plan: Plan
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]


def settings_of(session: Session) -> Settings:
    """What the session's engine was told, as far as it was recorded.

    Raises:
        SessionError: the session does not tell the sizes of its blocks.

    """
    metadata = session.metadata
    found = session_facts.read(session)
    told = measure(session, found).start_up
    sizes = [one.block_size for one in found.groups if one.block_size]
    if not sizes or found.max_model_len is None:
        raise SessionError(
            f"{session.directory}: metadata.json does not tell the KV cache's groups; plan from a "
            "model and a GPU in its place"
        )
    asynchronous = flag(part(metadata, "scheduler").get("async_scheduling"))
    stages = found.pipeline_parallel or 1
    second = text(part(metadata, "cuda_graphs").get("runner")) == "V2" or stages == 1
    state_dtype = text(part(metadata, "cache").get("mamba_ssm_cache_dtype"))
    latent = {one.block_size or 0 for one in found.groups if one.kind == "MLAAttentionSpec"}
    return Settings(
        platform=platforms.recorded(found.device, state_dtype, latent),
        gpu_bytes=None if told is None else told.total_bytes,
        gpu_source="the session's start-up",
        gpu_memory_utilization=found.gpu_memory_utilization or 1.0,
        max_model_len=found.max_model_len,
        block_size=min(sizes),
        kv_cache_dtype=found.cache_dtype or "auto",
        state_dtype=state_dtype,
        tensor_parallel=found.tensor_parallel or 1,
        pipeline_parallel=stages,
        prefix_caching=found.prefix_caching is not False,
        max_num_batched_tokens=found.scheduler.max_num_batched_tokens,
        in_flight_batches=stages + 1 if asynchronous and second else stages,
    )


def model_of(session: Session) -> tuple[Model, Path | None]:
    """The model that the session served, and where its files are.

    Where its configuration is not on this machine: as the session recorded it, every layer
    alike and nothing of its weights.

    Raises:
        SessionError: it does not tell.
        RuleError: the groups are of several kinds, for which the numbers do not do.

    """
    told = part(session.metadata, "model")
    found = session_facts.read(session)
    if found.model:
        try:
            path = local.find(found.model)
            return config.read(path, name=found.model), path if path.is_dir() else None
        except RuleError:
            # It was served under another name, on another machine, or is not understood.
            pass
    return _recorded(session, told, found), None


def _recorded(session: Session, told: Mapping[str, Any], found: Facts) -> Model:
    layers, heads = whole(told.get("layers")), whole(told.get("kv_heads"))
    size, dtype = whole(told.get("head_size")), text(told.get("dtype"))
    if not layers or not heads or not size or dtype is None:
        raise SessionError(
            f"{session.directory}: metadata.json does not tell the model's layers; name the "
            "model's folder or its config.json"
        )
    kinds = {one.kind for one in found.groups}
    if kinds - {"FullAttentionSpec", "MLAAttentionSpec"}:
        raise RuleError(
            f"the session's model keeps {', '.join(sorted(filter(None, kinds)))}, which the "
            "session alone does not describe; name the model's folder or its config.json"
        )
    latent = kinds == {"MLAAttentionSpec"}
    gpus, stages = found.tensor_parallel or 1, found.pipeline_parallel or 1
    kept = Attention(heads * (1 if latent else gpus), size, 0 if latent else size, latent=latent)
    told_by = "metadata.json: model"
    return Model(
        name=found.model or "the session's model",
        dtype=dtype,
        layers=((kept,),) * (layers * stages),
        max_model_len=found.max_model_len,
        parameters=None,
        quantization=None,
        quantized_bytes=None,
        sources={"layers": told_by, "kv_heads": told_by, "head_size": told_by, "dtype": told_by},
    )


def against(
    session: Session,
    model: Model,
    settings: Settings,
    *,
    folder: Path | None = None,
    average_len: int | None = None,
    worst_len: int | None = None,
    grouping: Grouping = group,
) -> Reality:
    """The plan for this model with the session's settings, beside what the engine did.

    Args:
        session: the session.
        model: the model, of its configuration or as the session recorded it.
        settings: what ``settings_of`` found, changed or not.
        folder: where the model's weights lie, None where they are not at hand.
        average_len: tokens of a usual sequence.
        worst_len: tokens of the longest sequence expected.
        grouping: makes the groups; the arithmetic here by default.

    Raises:
        RuleError: a setting makes no sense, or the model cannot be served so.
        SessionError: a table of the session cannot be read.

    """
    found = session_facts.read(session)
    told = measure(session, found).start_up
    notes = list(_states(model, settings))

    def planned(changed: Settings) -> Plan:
        return plan(
            model,
            changed,
            folder=folder,
            average_len=average_len,
            worst_len=worst_len,
            grouping=grouping,
        )

    made = planned(settings)
    has_weights = made.weights is not None
    if not has_weights and told is not None and told.weights_bytes is not None:
        gpus = settings.tensor_parallel * settings.pipeline_parallel
        made = planned(replace(settings, weight_bytes=told.weights_bytes * gpus))
        notes.append(
            "The weights are the session's own: name the model's folder or its config.json to "
            "predict them."
        )
    given = made.pool is None and found.pool_blocks
    if given:
        made = planned(replace(settings, blocks=found.pool_blocks))
        notes.append(
            "The session tells no memory of a GPU: its blocks are taken as given, and what "
            "follows from them is predicted."
        )
    figures = tuple(_figures(model, made, found, told, has_weights=has_weights, given=bool(given)))
    name = text(session.metadata.get("session_id")) or session.directory.name
    return Reality(name, made, figures, tuple(notes))


def _states(model: Model, settings: Settings) -> Iterator[str]:
    """What is not known of the states of an engine that ran on a CPU."""
    platform = settings.platform
    if platform.float32_states is not None or not any(isinstance(x, State) for x in model.cached):
        return
    precise = replace(settings, platform=replace(platform, float32_states=True))
    # Blocks too short for states in float32 show that these were not.
    if block_size(model, precise) == block_size(model, settings):
        yield (
            "The session does not record the type of its states. On a processor with AVX512-BF16 "
            f"vLLM keeps them in float32: --platform {platforms.BF16_CPU.name}."
        )


def _figures(
    model: Model,
    made: Plan,
    found: Facts,
    told: StartUp | None,
    *,
    has_weights: bool,
    given: bool,
) -> Iterator[Figure]:
    block = max(made.layout.bytes_per_block)
    yield _figure("A block of the pool", "bytes", block, found.bytes_per_block, ())
    if told is not None and made.memory is not None:
        yield _figure(
            "Memory asked for", "bytes", made.memory.requested_bytes, told.requested_bytes, ()
        )
        if has_weights:
            yield _weights(made, made.memory, told)
        parts = tuple(_memory(made.memory, told))
        yield _figure("Left for the KV cache", "bytes", made.memory.kv_bytes, told.kv_bytes, parts)
    if made.pool is None or not found.pool_blocks:
        return
    if not given:
        parts = tuple(_blocks(made, found, told))
        yield _figure("Blocks", "blocks", made.pool.blocks, found.pool_blocks, parts)
    there = capacity.pool(found.pool_blocks, model, made.settings, made.layout)
    yield _tokens(made.pool, there, found, made.layout)
    yield _concurrency(made.pool, there, found)


def _figure(
    name: str, unit: str, predicted: float, measured: float | None, parts: Sequence[Part]
) -> Figure:
    """The figure, with its parts where the difference is worth them; what they leave is one."""
    if measured is None or predicted <= 0:
        return Figure(name, unit, predicted, measured, None, ())
    gap = measured - predicted
    difference = gap / predicted
    if abs(difference) <= SAME:
        return Figure(name, unit, predicted, measured, difference, ())
    kept = [one for one in parts if one.amount]
    rest = gap - sum(one.amount for one in kept)
    if abs(rest) > SAME * predicted:
        kept.append(Part("Not explained", rest, "no figure of the session accounts for it", False))
    return Figure(name, unit, predicted, measured, difference, tuple(kept))


def _weights(made: Plan, memory: Memory, told: StartUp) -> Figure:
    measured = told.weights_bytes
    parts = []
    if measured is not None and made.weights is not None:
        why = (
            "the plan's are an estimate from config.json"
            if made.weights.is_estimate
            else f"the plan's are from {made.weights.source}"
        )
        gap = measured - memory.weight_bytes
        parts.append(Part("Weights", gap, why, explained=made.weights.is_estimate))
    return _figure("Weights", "bytes", memory.weight_bytes, measured, parts)


def _memory(memory: Memory, told: StartUp) -> Iterator[Part]:
    """What of the memory left for the KV cache each figure accounts for, in bytes."""
    yield from _before(memory, told)
    if memory.other_bytes:
        yield Part("--other-memory", memory.other_bytes, "was planned for what follows")
    yield Part("Activations", -(told.activation_bytes or 0), "at the peak of a trial run")
    yield Part("Not by torch", -(told.non_torch_bytes or 0), "CUDA, NCCL and other libraries")
    if told.graphs_estimate_applied:
        yield Part(
            "CUDA graphs", -(told.graphs_estimated_bytes or 0), "estimated before they are captured"
        )
    if told.unexplained_bytes:
        yield Part(
            "Does not add up",
            -told.unexplained_bytes,
            "what vLLM left is not what its own figures leave",
            explained=False,
        )


def _before(memory: Memory, told: StartUp) -> Iterator[Part]:
    """What both start with: the memory asked for, and the weights."""
    if told.requested_bytes is not None:
        gap = told.requested_bytes - memory.requested_bytes
        yield Part("Memory asked for", gap, "gpu_memory_utilization of the GPU")
    if told.weights_bytes is not None:
        yield Part("Weights", memory.weight_bytes - told.weights_bytes, "planned, less loaded")


def _blocks(made: Plan, found: Facts, told: StartUp | None) -> Iterator[Part]:
    """What of the blocks each figure accounts for."""
    measured, memory = found.pool_blocks or 0, made.memory
    if told is None or memory is None or made.pool is None:
        return
    block = made.layout.bytes_per_block[memory.stage]
    if told.kv_bytes is None:
        if told.activation_bytes is None:
            yield from _given(measured - made.pool.blocks, memory, told, block)
        return
    for one in _memory(memory, told):
        yield replace(one, amount=one.amount / block)
    real = found.bytes_per_block or block
    yield Part(
        "A block's size",
        told.kv_bytes / real - told.kv_bytes / block,
        f"{real:,} bytes, where {block:,} were planned",
    )
    capped = measured - told.kv_bytes // real
    if capped:
        stages = made.settings.pipeline_parallel
        yield Part("The number of blocks", capped, _cap(found, told.kv_bytes // real, stages))


def _given(gap: int, memory: Memory, told: StartUp, block: int) -> Iterator[Part]:
    """The same where vLLM did not measure what was left."""
    parts = [replace(one, amount=one.amount / block) for one in _before(memory, told)]
    yield from parts
    yield Part(
        "The KV cache's memory",
        gap - sum(one.amount for one in parts),
        "what is left was not measured: vLLM leaves that out where kv_cache_memory_bytes is given",
    )


def _cap(found: Facts, fitting: int, stages: int) -> str:
    """Why the pool was not made of all the memory that was left to the worker with the least."""
    made_of = f"{found.pool_blocks or 0:,} blocks were made where {fitting:,} fit"
    if found.blocks_override:
        return f"{made_of}: --num-gpu-blocks-override {found.blocks_override} does that"
    if stages == 1:
        return f"{made_of}: num_gpu_blocks_override does that"
    return f"{made_of}: num_gpu_blocks_override, or a stage with larger blocks, does that"


def _tokens(pool: Pool, there: Pool, found: Facts, layout: Layout) -> Figure:
    """vLLM's tokens in the cache; ``there``: the plan's with the engine's blocks."""
    parts = [Part("Blocks", there.tokens - pool.tokens, "as above")]
    plain = _plainly(there.blocks, layout)
    if found.kv_tokens is not None and found.kv_tokens == plain != there.tokens:
        counted = "this release counts blocks x block size / groups"
        parts.append(Part("Another formula", plain - there.tokens, counted))
    return _figure("Tokens in the cache", "tokens", pool.tokens, found.kv_tokens, parts)


def _plainly(blocks: int, layout: Layout) -> int:
    size = min(one.block_size for one in layout.groups)
    return blocks * size // len(layout.groups)


def _concurrency(pool: Pool, there: Pool, found: Facts) -> Figure:
    gap = there.max_concurrency - pool.max_concurrency
    parts = [Part("Blocks", gap, "as above")]
    most = found.max_model_len or 0
    return _figure(
        f"Sequences of {most:,} tokens at once",
        "sequences",
        pool.max_concurrency,
        found.max_concurrency,
        parts,
    )
