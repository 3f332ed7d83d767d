# SPDX-License-Identifier: Apache-2.0
"""What does each layer of a model keep for a sequence, whatever GPUs serve it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_LAYERS = 1_000
"""More than any model has."""


@dataclass(frozen=True)
class Attention:
    """A layer that keeps keys and values of every token, or of the last ``window`` tokens.

    ``kv_heads``: heads on all GPUs together. ``head_size`` and ``value_size``: how many numbers
    a head keeps for a token's key and for its value. ``latent``: multi-head latent attention, or
    the index of a sparse one. It keeps one vector of ``head_size`` numbers for all heads and no
    value; each GPU keeps all of it. ``chunked``: the layer attends within chunks of ``window``
    tokens. ``element_bytes``: of a number, where that is not the cache's type.
    """

    kv_heads: int
    head_size: int
    value_size: int
    window: int | None = None
    latent: bool = False
    chunked: bool = False
    element_bytes: int | None = None


@dataclass(frozen=True)
class State:
    """A layer that keeps a state of fixed size: Mamba, or linear attention.

    A state is the last ``conv_steps`` inputs of a convolution, and a recurrent state. The
    convolution has ``channels`` + 2 x ``state_groups`` x ``state_size`` channels. The recurrent
    state has ``elements`` numbers of ``element_bytes`` bytes; None stands for the model's type.
    ``checkpoints``: how many more states vLLM keeps while it computes a prompt, with prefix
    caching on.
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
    """How many numbers the weights have, by where they are.

    ``embedding``: on the first stage of a pipeline. ``head``: on the last stage, 0 where the
    model uses the embedding there again. ``experts``: in the experts of all layers; some
    quantizations change these alone. ``dense``: in the rest of the layers.
    """

    embedding: int
    head: int
    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        """How many numbers the weights have in all."""
        return self.embedding + self.head + self.dense + self.experts


@dataclass(frozen=True)
class Model:
    """The part of a model's configuration that decides its memory.

    ``layers``: what each layer of the model keeps in the cache: nothing, keys and values, a
    state, or both. ``max_model_len``: tokens of the longest sequence where vLLM is not told, and
    ``most_model_len`` what it may be told; None where not known. ``heads``: attention heads of a
    layer, None where not known. ``cache_dtype``: the type of the cache that quantized weights ask
    for; None for the model's. ``quantization``: how the
    weights are stored, None for plain numbers of ``dtype``. ``quantized_bytes``: bytes of one
    quantized number. ``parameters``: given, or an estimate from the configuration; None where the
    configuration lacks an entry for it. ``sources``: where each figure comes from. ``unknown``: why
    the layers are not known here, where vLLM's own classes may know them; else None. ``doubt``:
    what to know where the reading was not compared with vLLM's class.
    """

    name: str
    dtype: str
    layers: tuple[tuple[Layer, ...], ...]
    max_model_len: int | None
    parameters: Parameters | None
    quantization: str | None
    quantized_bytes: float | None
    sources: Mapping[str, str]
    unknown: str | None = None
    heads: int | None = None
    cache_dtype: str | None = None
    most_model_len: int | None = None
    doubt: str | None = None

    @property
    def cached(self) -> tuple[Layer, ...]:
        """All that the layers keep, in one list."""
        return tuple(one for layer in self.layers for one in layer)


@dataclass(frozen=True)
class About:
    """A model in short. ``layers``: how many keep something in the cache. ``parameters``: how many
    numbers its weights have."""

    name: str
    dtype: str
    layers: int
    max_model_len: int | None
    parameters: int | None
    quantization: str | None
    sources: Mapping[str, str]


def about(model: Model) -> About:
    """The model in short."""
    return About(
        name=model.name,
        dtype=model.dtype,
        layers=len(model.cached),
        max_model_len=model.max_model_len,
        parameters=model.parameters.total if model.parameters else None,
        quantization=model.quantization,
        sources=model.sources,
    )
