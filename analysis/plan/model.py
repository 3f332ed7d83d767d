# SPDX-License-Identifier: Apache-2.0
"""What does a model keep for each sequence, layer by layer, whoever serves it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_LAYERS = 10_000
"""No model has more."""


@dataclass(frozen=True)
class Attention:
    """A layer that keeps keys and values of every token, or of the last ``window`` ones.

    ``kv_heads``: of the whole model. ``head_size`` and ``value_size``: numbers that a head keeps
    for a token's key and for its value. ``latent``: multi-head latent attention, which keeps one
    vector of ``head_size`` for all heads and no value, on every GPU alike.
    """

    kv_heads: int
    head_size: int
    value_size: int
    window: int | None = None
    latent: bool = False


@dataclass(frozen=True)
class State:
    """A layer that keeps a state of fixed size: Mamba, or linear attention.

    Of a sequence it keeps the last ``conv_steps`` inputs of a convolution over ``channels``
    channels and 2 x ``state_groups`` x ``state_size`` more, and ``elements`` numbers of a
    recurrent state, of ``element_bytes`` each (None: as the model's). ``checkpoints``: states
    more that vLLM keeps while a prompt is computed, where it caches prefixes.
    """

    kind: str
    channels: int
    conv_steps: int
    elements: int
    state_groups: int = 0
    state_size: int = 0
    element_bytes: int | None = None
    checkpoints: int = 0


Layer = Attention | State


@dataclass(frozen=True)
class Parameters:
    """How many numbers the weights are, by where they are.

    ``embedding`` is on the first stage of a pipeline, ``head`` on the last (0: the embedding is
    used again), ``dense`` and ``experts`` in the layers between; ``experts`` are those of a
    mixture of experts, which some quantizations are about alone.
    """

    embedding: int
    head: int
    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.dense + self.experts


@dataclass(frozen=True)
class Model:
    """A model's configuration, as far as the memory goes.

    ``layers``: for each layer of the model what it keeps in the cache; a layer may keep nothing,
    or a window's worth and a state. ``max_model_len``: tokens of the longest sequence.
    ``quantization``: how the weights are stored, None for plain numbers of ``dtype``;
    ``quantized_bytes``: bytes of a quantized number. ``parameters``: an estimate from the
    configuration, None where the model's family is not known. ``sources``: where each figure
    comes from.
    """

    name: str
    dtype: str
    layers: tuple[tuple[Layer, ...], ...]
    max_model_len: int | None
    parameters: Parameters | None
    quantization: str | None
    quantized_bytes: float | None
    sources: Mapping[str, str]

    @property
    def cached(self) -> tuple[Layer, ...]:
        """What is kept, without regard to the layer of the model it belongs to."""
        return tuple(one for layer in self.layers for one in layer)


@dataclass(frozen=True)
class About:
    """The model in a few words: ``layers`` counts those that keep something in the cache."""

    name: str
    dtype: str
    layers: int
    max_model_len: int | None
    parameters: int | None
    quantization: str | None
    sources: Mapping[str, str]


def about(model: Model) -> About:
    """The model in a few words."""
    return About(
        name=model.name,
        dtype=model.dtype,
        layers=len(model.cached),
        max_model_len=model.max_model_len,
        parameters=model.parameters.total if model.parameters else None,
        quantization=model.quantization,
        sources=model.sources,
    )
