# SPDX-License-Identifier: Apache-2.0
"""What does each layer keep on one GPU, in blocks of how many bytes?

The arithmetic of vLLM's ``v1/kv_cache_interface.py`` (page sizes) and ``platforms/interface.py``
(the block size of models that keep states).
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

LATENT_BLOCK = 128
"""Beside states, those of latent attention ask for a multiple of this many."""

Kind = Literal["full", "latent", "window", "state"]


@dataclass(frozen=True)
class Spec:
    """What one layer keeps on one GPU.

    ``block_size``: tokens of a block. ``kv_heads``, ``head_size``, ``value_size`` and
    ``element_bytes``: what it keeps for a token (``kv_heads`` on this GPU). ``window``: tokens
    that it keeps, None for all. ``state_bytes``: of a state; ``states``: how many of them a
    sequence holds. ``padded_bytes``: what a block takes where it is made as large as others.
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
"""By name, what the layers of one stage of the pipeline keep."""


def stages(model: Model, settings: Settings) -> tuple[Stage, ...]:
    """What each stage of the pipeline keeps on one GPU.

    Raises:
        RuleError: the model cannot be divided so.

    """
    size = block_size(model, settings)
    return tuple(
        {
            f"layers.{number}.{position}": _spec(layer, model, settings, size)
            for number in range(first, last)
            for position, layer in enumerate(model.layers[number])
        }
        for first, last in bounds(len(model.layers), settings.pipeline_parallel)
    )


def bounds(layers: int, count: int) -> list[tuple[int, int]]:
    """Where the layers of each stage begin and end, as vLLM's ``get_pp_indices`` divides them.

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
    """Bytes of one number in the cache."""
    if settings.kv_cache_dtype == "auto":
        return element_bytes(model.dtype, "--dtype")
    return element_bytes(settings.kv_cache_dtype, "--kv-cache-dtype")


def asked_block_size(model: Model, settings: Settings) -> int:
    """Tokens of a block as vLLM begins with them: those asked for, or the platform's."""
    if settings.platform.latent_block and _is_latent(model):
        return settings.platform.latent_block
    return settings.block_size or settings.platform.block_size


def block_size(model: Model, settings: Settings) -> int:
    """Tokens of a block: what is asked for, or as many as take no less than a state does, to
    which vLLM then pads the states (``_align_hybrid_block_size``).

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


def _is_latent(model: Model) -> bool:
    return any(isinstance(layer, Attention) and layer.latent for layer in model.cached)


def _enlarged(model: Model, settings: Settings) -> int:
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
        # Without prefix caching nothing ever asks for an earlier state.
        block_size=size if caching else _longest(model, settings),
        state_bytes=state_bytes(layer, model, settings),
        states=2 + layer.checkpoints if caching else 1,
    )


def _attention(layer: Attention, model: Model, settings: Settings, size: int) -> Spec:
    kind: Kind = "latent" if layer.latent else "full" if layer.window is None else "window"
    heads, gpus = layer.kv_heads, settings.tensor_parallel
    if not layer.latent and max(heads, gpus) % min(heads, gpus):
        raise RuleError(f"--tensor-parallel-size {gpus}: {heads} KV heads cannot be divided so")
    return Spec(
        kind=kind,
        block_size=size,
        # Where there are fewer heads than GPUs, several GPUs hold the same one.
        kv_heads=max(1, heads // gpus),
        head_size=layer.head_size,
        value_size=layer.value_size,
        element_bytes=kv_element_bytes(model, settings),
        window=layer.window,
    )


def _longest(model: Model, settings: Settings) -> int:
    length = settings.max_model_len or model.max_model_len
    if length is None:
        raise RuleError(f"{model.name} does not tell its longest sequence; give --max-model-len")
    return length


def without_windows(found: Sequence[Stage]) -> tuple[Stage, ...]:
    """The same with every layer keeping all tokens, as ``--disable-hybrid-kv-cache-manager``
    does to a model that has layers with a window and layers without."""
    specs = [spec for stage in found for spec in stage.values()]
    if not any(spec.kind in ("full", "latent") for spec in specs):
        return tuple(found)
    return tuple(
        {
            name: replace(spec, kind="full", window=None) if spec.kind == "window" else spec
            for name, spec in stage.items()
        }
        for stage in found
    )
