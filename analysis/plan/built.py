# SPDX-License-Identifier: Apache-2.0
"""What do vLLM's own classes make of a model, where vLLM could be asked?

``profilemate.simulation.asking`` asks vLLM. Nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from analysis.plan.groups import Layout
from analysis.plan.settings import Settings


@dataclass(frozen=True)
class Held:
    """The weights on one GPU of a pipeline stage, not quantized. ``total_bytes``: their bytes.
    ``ends``: numbers of the embedding and of the head; ``experts``: of the experts; ``dense``: of
    the rest."""

    total_bytes: int = 0
    ends: int = 0
    dense: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Built:
    """A model as vLLM's classes build it with the settings of a plan.

    ``release``: vLLM's. ``architecture``: the name of the class. ``layouts``: the groups by the
    size of block that is asked for, the one of the settings first. ``kv_cache_dtype``: the type of
    the cache, ``auto`` for the model's. ``max_model_len``: tokens of the longest sequence.
    ``batched_tokens``: tokens of a step. ``in_flight_batches``: how many steps may be under way.
    ``layers``: how many keep something.
    ``bytes_per_token``: bytes that all layers keep of a token, on all GPUs that share them;
    ``growing_bytes_per_token``: of the layers that keep every token. ``held``: the weights, by
    stage.
    """

    release: str
    architecture: str
    layouts: Mapping[int | None, Layout]
    kv_cache_dtype: str
    max_model_len: int
    batched_tokens: int
    in_flight_batches: int
    layers: int
    bytes_per_token: int
    growing_bytes_per_token: int
    held: tuple[Held, ...]

    @property
    def layout(self) -> Layout:
        """The groups with the settings' size of block."""
        return next(iter(self.layouts.values()))


Classes = Callable[[Settings], Built | None]
"""What vLLM's classes make of a model with these settings; None where they cannot be asked. Raises
RuleError where vLLM refuses."""


def not_asked(_: Settings) -> Built | None:
    """vLLM's classes are not asked."""
    return None
