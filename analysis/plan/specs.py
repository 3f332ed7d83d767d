# SPDX-License-Identifier: Apache-2.0
"""What does each layer keep on one GPU, and how many bytes does a block of it take?

This is the arithmetic of vLLM's ``v1/kv_cache_interface.py`` (page sizes) and
``platforms/interface.py`` (the block size of models that keep states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.errors import RuleError
from analysis.plan.model import Attention, Layer, Model, State
from analysis.plan.settings import Settings
from analysis.plan.sizes import element_bytes
from analysis.plan.states import state_bytes

INDEX_BLOCK = 64
"""Tokens of a block that CUDA's backend of sparse attention reads."""

LATENT_BLOCK = 128
"""In a model that keeps states, blocks of latent attention have a multiple of so many tokens."""

Kind = Literal["full", "latent", "window", "state", "chunked", "cross"]


@dataclass(frozen=True)
class Spec:
    """What one layer keeps on one GPU.

    ``block_size``: tokens of a block. ``kv_heads``: heads on this GPU. ``head_size`` and
    ``value_size``: how many numbers a head keeps for a token's key and value. ``element_bytes``:
    bytes of one such number. ``window``: tokens that the layer keeps, None for all.
    ``state_bytes``: bytes of a state. ``states``: how many states a sequence holds.
    ``padded_bytes``: bytes of a block with the padding that makes it as large as other layers'.
    """

    kind: Kind
    block_size: int
    kv_heads: int = 0
    head_size: int = 0
    value_size: int = 0
    element_bytes: int = 0
    window: int | None = None
    state_bytes: int = 0
    states: int = 0
    padded_bytes: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token; 0 for a state."""
        return self.kv_heads * (self.head_size + self.value_size) * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return self.padded_bytes or self.state_bytes or self.token_bytes * self.block_size


Stage = dict[str, Spec]
"""The layers of one pipeline stage, by name."""


def stages(model: Model, settings: Settings) -> tuple[Stage, ...]:
    """What the layers of each pipeline stage keep on one GPU.

    Raises:
        RuleError: the stages or the GPUs cannot share the model, or the platform cannot read its
            blocks.

    """
    size, gpus = block_size(model, settings), settings.tensor_parallel
    if has_index(model):
        _check_index(model, settings, size)
    if model.heads is not None and model.heads % gpus:
        raise RuleError(
            f"--tensor-parallel-size {gpus}: {model.heads} attention heads cannot be divided so"
        )
    return tuple(
        {
            f"layers.{number}.{position}": _spec(layer, model, settings, size)
            for number in range(first, last)
            for position, layer in enumerate(model.layers[number])
        }
        for first, last in bounds(len(model.layers), settings.pipeline_parallel)
    )


def _check_index(model: Model, settings: Settings, size: int) -> None:
    """Raise a RuleError where sparse attention does not go with the settings."""
    if settings.platform.device == "CPU":
        raise RuleError(f"{model.name} has sparse attention, which vLLM does not run on a CPU")
    if size % INDEX_BLOCK:
        raise RuleError(
            f"--block-size {size}: sparse attention reads blocks of a multiple of {INDEX_BLOCK} "
            "tokens"
        )
    if kv_element_bytes(model, settings) == 1:
        raise RuleError(
            f"{model.name} has sparse attention, whose 8-bit cache plan does not know. Where vLLM "
            "is installed, its own classes know it"
        )


def bounds(layers: int, count: int) -> list[tuple[int, int]]:
    """The first layer of each of ``count`` stages and the layer after its last, as vLLM's
    ``get_pp_indices`` divides ``layers`` layers.

    Raises:
        RuleError: there are more stages than layers.

    """
    if count > layers:
        raise RuleError(
            f"--pipeline-parallel-size {count}: the model has {layers} layers, fewer than stages"
        )
    sizes = [layers // count] * count
    for stage in range(2, layers % count + 2):
        sizes[-stage] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(count)]
    return list(zip([0, *ends], ends, strict=False))


def kv_element_bytes(model: Model, settings: Settings) -> int:
    """Bytes of one number of a key or a value in the cache.

    Raises:
        RuleError: its type is not known here.

    """
    if settings.kv_cache_dtype == "auto":
        return element_bytes(model.cache_dtype or model.dtype, "--dtype")
    return element_bytes(settings.kv_cache_dtype, "--kv-cache-dtype")


def asked_block_size(model: Model, settings: Settings) -> int:
    """Tokens of a block that vLLM starts from: as the settings ask, or as the platform has
    them."""
    if settings.platform.latent_block and _is_latent(model):
        return settings.platform.latent_block
    if settings.block_size is None and has_index(model):
        return INDEX_BLOCK
    return settings.block_size or settings.platform.block_size


def block_size(model: Model, settings: Settings) -> int:
    """Tokens of a block in the end. Where a model keeps states, vLLM makes a block at least as
    large as a state, and pads the states to it (``_align_hybrid_block_size``).

    Raises:
        RuleError: the platform's attention cannot read such blocks.

    """
    platform, found = settings.platform, _enlarged(model, settings)
    takes_any = platform.device == "GPU" or (platform.latent_block and _is_latent(model))
    if found % platform.kernel_block and not takes_any:
        raise RuleError(
            f"--block-size {found}: attention on a {platform.device} reads blocks of a multiple "
            f"of {platform.kernel_block} tokens"
        )
    return found


def has_index(model: Model) -> bool:
    """Whether the model's attention is sparse, and keeps an index beside its vectors."""
    return any(isinstance(one, Attention) and one.element_bytes for one in model.cached)


def _is_latent(model: Model) -> bool:
    return any(isinstance(layer, Attention) and layer.latent for layer in model.cached)


def _enlarged(model: Model, settings: Settings) -> int:
    """Tokens of a block as asked, or more where a block has to be as large as a state."""
    asked, kernel = asked_block_size(model, settings), settings.platform.kernel_block
    states = [layer for layer in model.cached if isinstance(layer, State)]
    tokens = [layer for layer in model.cached if isinstance(layer, Attention)]
    if not states or not tokens:
        return asked
    token = _attention(tokens[0], model, settings, 1).token_bytes
    state = max(state_bytes(layer, model, settings) for layer in states)
    step = max(kernel, asked, LATENT_BLOCK if tokens[0].latent else 0)
    least = step * -(-state // (step * token))
    return max(asked, kernel * -(-least // kernel))


def _spec(layer: Layer, model: Model, settings: Settings, size: int) -> Spec:
    if isinstance(layer, Attention):
        return _attention(layer, model, settings, size)
    caching = settings.prefix_caching
    return Spec(
        kind="state",
        # Without prefix caching no request looks up an earlier state.
        block_size=size if caching else max_model_len(model, settings),
        state_bytes=state_bytes(layer, model, settings),
        states=2 + layer.checkpoints if caching else 1,
    )


def _attention(layer: Attention, model: Model, settings: Settings, size: int) -> Spec:
    kind: Kind = "latent" if layer.latent else "full" if layer.window is None else "window"
    if layer.chunked:
        kind = "chunked"
    heads, gpus = layer.kv_heads, settings.tensor_parallel
    if not layer.latent and max(heads, gpus) % min(heads, gpus):
        raise RuleError(f"--tensor-parallel-size {gpus}: {heads} KV heads cannot be divided so")
    return Spec(
        kind=kind,
        block_size=size,
        # Where there are fewer heads than GPUs, several GPUs hold the same head.
        kv_heads=max(1, heads // gpus),
        head_size=layer.head_size,
        value_size=layer.value_size,
        element_bytes=layer.element_bytes or kv_element_bytes(model, settings),
        window=layer.window,
    )


def max_model_len(model: Model, settings: Settings) -> int:
    """Tokens of the longest sequence that vLLM serves.

    Raises:
        RuleError: neither the model nor a setting has it.

    """
    asked, most = settings.max_model_len, model.most_model_len
    if asked is not None and most is not None and asked > most:
        raise RuleError(
            f"--max-model-len {asked:,}: vLLM refuses more than the {most:,} tokens of "
            f"{model.sources.get('max_model_len', 'the model')}"
        )
    length = asked or model.max_model_len
    if length is None:
        raise RuleError(
            f"{model.name} does not say how long a sequence may be; give --max-model-len"
        )
    return length


def without_windows(found: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with layers that keep all tokens in place of a window. This is what
    ``--disable-hybrid-kv-cache-manager`` does to a model that has both kinds of layers."""
    specs = [spec for stage in found for spec in stage.values()]
    if not any(spec.kind in ("full", "latent") for spec in specs):
        return tuple(found)
    return tuple(
        {
            name: replace(spec, kind="full", window=None)
            if spec.kind in ("window", "chunked")
            else spec
            for name, spec in stage.items()
        }
        for stage in found
    )
