# SPDX-License-Identifier: Apache-2.0
"""How much KV cache will a model have on these GPUs, and how many sequences will fit?

``plan`` goes from a model's configuration and a GPU's size to bytes, blocks, tokens and
sequences, as vLLM does at start-up. Nothing here imports vLLM: ``profilemate.simulation.groups``
lets vLLM make the groups in place of ``groups.group``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.plan import capacity
from analysis.plan.capacity import ByBlockSize, ByUtilization, Length, Memory, Pool
from analysis.plan.explain import Step, steps
from analysis.plan.groups import Grouping, Layout, group
from analysis.plan.model import About, Model, about
from analysis.plan.settings import Settings, check, check_count
from analysis.plan.specs import asked_block_size
from analysis.plan.weights import Weights, measure


@dataclass(frozen=True)
class Plan:
    """What was planned.

    ``bytes_per_token``: of all layers, over the GPUs that share them;
    ``growing_bytes_per_token``: of those that keep every token. ``layout``: the groups, and what
    a block takes on a GPU of each stage. ``memory`` and ``pool``: None where no GPU, or no
    weights, are known. ``average`` and ``worst``: sequences of these lengths, None where not
    asked for. ``notes``: what to know before trusting it. ``steps``: the arithmetic.
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
) -> Plan:
    """The plan for this model with these settings.

    Args:
        model: the model.
        settings: what vLLM is told, and the GPU.
        folder: where the model's weights lie, None where they are not at hand.
        average_len: tokens of a usual sequence, prompt and output together.
        worst_len: tokens of the longest one expected; the model's longest by default.
        grouping: makes the groups; the arithmetic here by default.

    Raises:
        RuleError: a setting makes no sense, or the model cannot be served so.

    """
    check(settings)
    check_count("--average-len", average_len)
    check_count("--worst-len", worst_len)
    settings = replace(settings, block_size=asked_block_size(model, settings))
    layout = capacity.lay_out(model, settings, grouping)
    weights = measure(model, settings, folder)
    left = capacity.memory(settings, weights, layout)
    blocks = capacity.blocks_of(settings, left, layout)
    most = capacity.max_model_len(model, settings)
    made = capacity.pool(blocks, model, settings, layout) if blocks else None

    def length(tokens: int) -> Length:
        return capacity.length(tokens, blocks, settings, layout)

    average = None if average_len is None else length(average_len)
    rows = capacity.lengths(most, [] if average_len is None else [average_len])
    worst = length(worst_len or most)
    return Plan(
        model=about(model),
        settings=settings,
        max_model_len=most,
        bytes_per_token=capacity.bytes_per_token(model, settings),
        growing_bytes_per_token=capacity.bytes_per_token(model, settings, growing=True),
        layout=layout,
        weights=weights,
        memory=left,
        pool=made,
        by_length=tuple(map(length, rows)),
        by_utilization=tuple(capacity.by_utilization(model, settings, weights, layout)),
        by_block_size=tuple(
            capacity.by_block_size(average_len or worst.tokens, model, settings, weights, grouping)
        ),
        average=average,
        worst=worst,
        notes=(
            *_too_long(max(average_len or 0, worst_len or 0), most),
            *_notes(model, settings, weights, left, made, most, layout),
        ),
        steps=steps(model, settings, layout, weights, left, made, most),
    )


def _too_long(expected: int, most: int) -> list[str]:
    if expected <= most:
        return []
    return [f"vLLM would refuse a sequence of {expected:,} tokens: --max-model-len is {most:,}."]


def _notes(
    model: Model,
    settings: Settings,
    weights: Weights | None,
    left: Memory | None,
    made: Pool | None,
    most: int,
    layout: Layout,
) -> list[str]:
    notes = []
    if left is not None and left.kv_bytes <= 0:
        notes.append(
            f"The weights and the rest take more than vLLM may: no KV cache. It takes more "
            f"{settings.platform.device}s (--tensor-parallel-size, --pipeline-parallel-size) or "
            "smaller weights."
        )
    if made is not None and made.longest < most:
        fits = f"--max-model-len {made.longest} does" if made.longest else "No length does"
        notes.append(
            f"vLLM would refuse to start: one sequence of {most:,} tokens does not fit. {fits}."
        )
    given = settings.blocks is not None or settings.kv_bytes is not None
    if left is not None and not settings.other_bytes and not given:
        notes.append(_other_memory(settings))
    if left is not None and weights is not None and weights.is_estimate:
        notes.append("The weights are an estimate: name the folder with the model's files.")
    if weights is None and settings.gpu_bytes is not None and not given:
        notes.append(
            "What the weights take is not known, so neither is what is left for the KV cache: "
            "give --weights or --parameters."
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
        "them with --other-memory. A session tells them: profilemate plan --session SESSION."
    )


def _latent(settings: Settings) -> Iterator[str]:
    if settings.platform.latent_block:
        yield (
            f"Without AMX latent attention takes blocks of {settings.platform.latent_block} "
            "tokens alone, and vLLM caches no prefixes."
        )
    elif settings.platform.device == "GPU" and settings.block_size == 16:
        yield (
            "Attention backends for latent attention often ask for blocks of 64 or 128 tokens, "
            "and vLLM gives them: see --block-size."
        )
