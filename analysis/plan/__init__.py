# SPDX-License-Identifier: Apache-2.0
"""How much KV cache will a model have on these GPUs, and how many sequences will fit?

``plan`` computes bytes, blocks, tokens and sequences from a model's configuration and a GPU's
size, as vLLM does at start-up. Nothing here imports vLLM. ``profilemate.simulation.asking`` can
ask vLLM's classes of the model, and ``profilemate.simulation.groups`` can replace ``groups.group``:
it lets vLLM make the groups of the layers that are read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.errors import RuleError
from analysis.plan import capacity, classes
from analysis.plan.built import Classes, not_asked
from analysis.plan.capacity import ByBlockSize, ByUtilization, Length, Memory, Pool
from analysis.plan.explain import Step, steps
from analysis.plan.groups import Grouping, Layout, group
from analysis.plan.model import About, Model, about
from analysis.plan.settings import Settings, check, check_count
from analysis.plan.specs import asked_block_size, max_model_len
from analysis.plan.weights import Weights, measure


@dataclass(frozen=True)
class Plan:
    """A plan: the memory, the pool, and the sequences that fit.

    ``bytes_per_token``: bytes that all layers keep of a token, on all GPUs that share them.
    ``growing_bytes_per_token``: the same for the layers that keep every token. ``layout``: the
    groups, and the bytes of a block on a GPU of each stage. ``memory`` and ``pool``: None where
    the GPU or the weights are not known. ``average``: a sequence of the usual length, None where
    no such length was given. ``worst``: the longest sequence expected. ``notes``: what to know
    before trusting the plan. ``steps``: the arithmetic.
    """

    model: About
    settings: Settings
    max_model_len: int
    bytes_per_token: int
    growing_bytes_per_token: int
    layout: Layout
    weights: Weights | None
    memory: Memory | None
    pool: Pool | None
    by_length: tuple[Length, ...]
    by_utilization: tuple[ByUtilization, ...]
    by_block_size: tuple[ByBlockSize, ...]
    average: Length | None
    worst: Length
    notes: tuple[str, ...]
    steps: tuple[Step, ...]


def plan(
    model: Model,
    settings: Settings,
    *,
    folder: Path | None = None,
    average_len: int | None = None,
    worst_len: int | None = None,
    grouping: Grouping = group,
    ask: Classes = not_asked,
) -> Plan:
    """Plan this model with these settings.

    Args:
        model: the model.
        settings: vLLM's settings, and the GPU.
        folder: the folder with the model's weights; None where there is none.
        average_len: tokens of a usual sequence, prompt and answer together.
        worst_len: tokens of the longest sequence expected; by default the longest that vLLM
            serves.
        grouping: makes the groups; by default ``groups.group``.
        ask: what vLLM's own classes make of the model with given settings, which then decides;
            by default they are not asked.

    Raises:
        RuleError: a setting makes no sense, vLLM cannot serve the model with these settings, its
            layers are not known, or a file of weights cannot be read.

    """
    check(settings)
    check_count("--average-len", average_len)
    check_count("--worst-len", worst_len)
    built = ask(settings)
    if built is None and model.unknown is not None:
        raise RuleError(model.unknown)
    asked = settings
    if built is not None:
        model, settings = classes.applied(built, model, settings)
    settings = replace(settings, block_size=asked_block_size(model, settings))
    layout = capacity.lay_out(model, settings, grouping) if built is None else built.layout
    other = None if built is None else classes.difference(built, model, settings)
    weights = measure(model, settings, folder, built)
    memory = capacity.memory(settings, weights, layout)
    blocks = capacity.blocks_of(settings, memory, layout)
    longest = max_model_len(model, settings)
    pool = capacity.pool(blocks, model, settings, layout) if blocks else None

    def length(tokens: int) -> Length:
        return capacity.length(tokens, blocks, settings, layout)

    average = None if average_len is None else length(average_len)
    rows = capacity.lengths(longest, [] if average_len is None else [average_len])
    worst = length(worst_len or longest)
    if built is None:
        by_block_size = capacity.by_block_size(
            average_len or worst.tokens, model, settings, weights, grouping
        )
        per_token = (
            capacity.bytes_per_token(model, settings),
            capacity.bytes_per_token(model, settings, growing=True),
        )
    else:
        by_block_size = classes.by_block_size(
            average_len or worst.tokens, settings, weights, built, given=asked.block_size
        )
        per_token = (built.bytes_per_token, built.growing_bytes_per_token)
    return Plan(
        model=about(model) if built is None else classes.about(built, model, settings),
        settings=settings,
        max_model_len=longest,
        bytes_per_token=per_token[0],
        growing_bytes_per_token=per_token[1],
        layout=layout,
        weights=weights,
        memory=memory,
        pool=pool,
        by_length=tuple(map(length, rows)),
        by_utilization=tuple(capacity.by_utilization(model, settings, weights, layout)),
        by_block_size=tuple(by_block_size),
        average=average,
        worst=worst,
        notes=(
            *_too_long(max(average_len or 0, worst_len or 0), longest),
            *_notes(settings, weights, memory, pool, longest, layout),
            *(() if other is None or model.unknown else (other,)),
            *((model.doubt,) if built is None and model.doubt is not None else ()),
        ),
        steps=steps(
            model, settings, layout, weights, memory, pool, longest, built if other else None
        ),
    )


def _too_long(expected: int, longest: int) -> list[str]:
    if expected <= longest:
        return []
    return [f"vLLM would refuse a sequence of {expected:,} tokens: --max-model-len is {longest:,}."]


def _notes(
    settings: Settings,
    weights: Weights | None,
    memory: Memory | None,
    pool: Pool | None,
    longest: int,
    layout: Layout,
) -> list[str]:
    notes = []
    if memory is not None and memory.kv_bytes <= 0:
        notes.append(
            "The weights and the rest take all the memory that vLLM may take: none is left for "
            f"the KV cache. Use more {settings.platform.device}s (--tensor-parallel-size, "
            "--pipeline-parallel-size) or smaller weights."
        )
    if pool is not None and pool.longest < longest:
        fits = f"--max-model-len {pool.longest} does" if pool.longest else "No length does"
        notes.append(
            f"vLLM would refuse to start: one sequence of {longest:,} tokens does not fit. {fits}."
        )
    given = settings.blocks is not None or settings.kv_bytes is not None
    if memory is not None and not settings.other_bytes and not given:
        notes.append(_other_memory(settings))
    if memory is not None and weights is not None and weights.is_estimate:
        notes.append("The weights are an estimate: name the folder with the model's files.")
    if weights is None and settings.gpu_bytes is not None and not given:
        notes.append(
            "The size of the weights is not known, so the memory left for the KV cache is not "
            "known: give --weights or --parameters."
        )
    if any(one.kind == "latent" for one in layout.groups):
        notes += _latent(settings)
    return notes


def _other_memory(settings: Settings) -> str:
    if settings.platform.device == "CPU":
        return (
            "What vLLM's process takes beside the weights is not counted: give it with "
            "--other-memory."
        )
    return (
        "Activations, CUDA graphs and what torch does not allocate are not counted: give "
        "them with --other-memory. A session has them: profilemate plan --session SESSION."
    )


def _latent(settings: Settings) -> Iterator[str]:
    if settings.platform.latent_block:
        yield (
            "Without AMX, latent attention takes only blocks of "
            f"{settings.platform.latent_block} tokens, and vLLM caches no prefixes."
        )
    elif settings.platform.device == "GPU" and settings.block_size == 16:
        yield (
            "Attention backends for latent attention often ask for blocks of 64 or 128 tokens, "
            "and vLLM then uses these: see --block-size."
        )
