# SPDX-License-Identifier: Apache-2.0
"""Are vLLM's own classes of the model asked, and what do they make of it?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from analysis.errors import RuleError
from profilemate.commands.plan_groups import Vllm
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.plan.built import Built, Classes
    from analysis.plan.settings import Settings
    from profilemate.simulation.classes import Asked


def asking(entries: Mapping[str, Any] | None, vllm: Vllm, *, dtype: str | None) -> Classes:
    """What vLLM's classes make of a model with given settings.

    They are asked once for the same settings. Where they cannot say, one line tells so, and the
    plan goes by the reading of the config.json.

    Args:
        entries: those of the model's config.json; None for a model without one.
        vllm: whether it can be asked.
        dtype: the type of the weights, in place of the model's own.

    """
    from analysis.plan.built import not_asked

    # No model has so many layers, and vLLM would build them all.
    if entries is None or not vllm.is_usable or not _is_buildable(entries):
        return not_asked
    from profilemate.simulation.asking import ask
    from profilemate.simulation.classes import NotKnownError, NoVllmError, RefusedError

    config = json.dumps(entries)
    answers: dict[Asked, Built | None] = {}

    def by_vllm(settings: Settings) -> Built | None:
        asked = _asked(config, settings, dtype)
        if asked not in answers and not vllm.is_usable:
            return None
        if asked not in answers:
            try:
                answers[asked] = ask(asked)
            except RefusedError as error:
                raise RuleError(f"vLLM refuses: {error}") from None
            except NoVllmError as error:
                say(f"planning without vLLM: {error}")
                vllm.is_usable = False
                return None
            except NotKnownError as error:
                say(f"planning without vLLM's class of the model: {error}")
                answers[asked] = None
        return answers[asked]

    return by_vllm


def _is_buildable(entries: Mapping[str, Any]) -> bool:
    from analysis.plan.model import MOST_LAYERS

    inner = entries.get("text_config")
    counts = [
        part.get(key)
        for part in (entries, inner if isinstance(inner, Mapping) else {})
        for key in ("num_hidden_layers", "n_layer", "num_layers")
    ]
    return not any(isinstance(count, (int, float)) and count > MOST_LAYERS for count in counts)


def _asked(config: str, settings: Settings, dtype: str | None) -> Asked:
    from analysis.plan.capacity import BLOCK_SIZES
    from profilemate.simulation.classes import Asked

    return Asked(
        config=config,
        platform=_platform(settings),
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        kv_cache_dtype=settings.kv_cache_dtype,
        state_dtype=settings.state_dtype,
        dtype=dtype or "auto",
        max_model_len=settings.max_model_len,
        batched_tokens=settings.batched_tokens,
        prefix_caching=settings.prefix_caching,
        hybrid=settings.hybrid,
        sizes=(settings.block_size, *(one for one in BLOCK_SIZES if one != settings.block_size)),
    )


def _platform(settings: Settings) -> str:
    """The platform whose answers vLLM gives."""
    from analysis.plan.platforms import PLATFORMS

    platform = settings.platform
    if platform.name in PLATFORMS:
        return platform.name
    if platform.latent_block is None:
        return "cpu-amx"
    return "cpu-avx512-bf16" if platform.float32_states else "cpu-basic"
