# SPDX-License-Identifier: Apache-2.0
"""How does a plan take what vLLM's own classes make of the model?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from analysis.errors import RuleError
from analysis.plan import capacity, model
from analysis.plan.built import Built
from analysis.plan.capacity import ByBlockSize
from analysis.plan.groups import group
from analysis.plan.model import About, Model
from analysis.plan.settings import Settings
from analysis.plan.weights import Weights


def applied(built: Built, known: Model, settings: Settings) -> tuple[Model, Settings]:
    """The model and the settings with what vLLM chose.

    Raises:
        RuleError: the model keeps nothing in the cache.

    """
    if not built.layout.groups:
        raise RuleError(
            f"{known.name} needs no KV cache: no layer of vLLM {built.release}'s "
            f"{built.architecture} keeps anything in it, as in encoders. There is nothing to plan"
        )
    if settings.kv_cache_dtype == "auto":
        settings = replace(settings, kv_cache_dtype=built.kv_cache_dtype)
    if settings.max_num_batched_tokens is None and built.batched_tokens > settings.batched_tokens:
        settings = replace(settings, max_num_batched_tokens=built.batched_tokens)
    if settings.in_flight_batches is None:
        settings = replace(settings, in_flight_batches=built.in_flight_batches)
    return replace(known, max_model_len=built.max_model_len), settings


def difference(built: Built, known: Model, settings: Settings) -> str | None:
    """What the reading of the config.json makes other than vLLM's class; None where nothing."""
    if known.unknown is not None:
        return known.unknown
    name = f"vLLM {built.release}'s {built.architecture}"
    try:
        own = capacity.lay_out(known, settings, group)
    except RuleError as error:
        return f"{name} decides. Without it: {error}"
    theirs = built.layout
    if (own.groups, own.bytes_per_block) == (theirs.groups, theirs.bytes_per_block):
        return None
    return (
        f"{name} decides: a block takes {max(theirs.bytes_per_block):,} B. Without it the "
        f"config.json would be read as {max(own.bytes_per_block):,} B."
    )


def about(built: Built, known: Model, settings: Settings) -> About:
    """The model in short."""
    found = replace(model.about(known), layers=built.layers)
    if "parameters" in known.sources:
        return found
    of_a_gpu = sum(one.ends + one.dense + one.experts for one in built.held)
    shares = " (of all GPUs' shares)" if settings.tensor_parallel > 1 else ""
    source = f"vLLM {built.release}'s {built.architecture}{shares}"
    return replace(
        found,
        parameters=of_a_gpu * settings.tensor_parallel,
        sources={**found.sources, "parameters": source},
    )


def by_block_size(
    tokens: int, settings: Settings, weights: Weights | None, built: Built, *, given: int | None
) -> Iterator[ByBlockSize]:
    """The pool, and a sequence of ``tokens`` tokens, at the sizes of block that vLLM was asked for.
    ``given``: the size in the user's settings, None where there is none."""
    rows = {}
    for size, layout in built.layouts.items():
        effective = max((one.block_size for one in layout.groups if one.token_bytes), default=0)
        shown = size or settings.block_size or settings.platform.block_size
        if size is None and not any(one.kind == "state" for one in layout.groups):
            # Where vLLM is free to choose, it chooses what attention reads.
            shown = effective or shown
        if shown in rows or (settings.blocks is not None and size != given):
            continue
        count = capacity.blocks_of(settings, capacity.memory(settings, weights, layout), layout)
        rows[shown] = ByBlockSize(
            block_size=shown,
            effective=effective or shown,
            bytes_per_block=max(layout.bytes_per_block),
            blocks=count,
            length=capacity.length(tokens, count, settings, layout),
        )
    for shown in sorted(rows):
        yield rows[shown]
