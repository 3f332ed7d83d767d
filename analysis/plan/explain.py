# SPDX-License-Identifier: Apache-2.0
"""Where does each number of a plan come from, step by step?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analysis.plan.built import Built
from analysis.plan.capacity import Memory, Pool
from analysis.plan.groups import Group, Layout
from analysis.plan.model import Attention, Model, State
from analysis.plan.settings import Settings
from analysis.plan.specs import asked_block_size, block_size, kv_element_bytes
from analysis.plan.states import shape, state_bytes
from analysis.plan.weights import Weights


@dataclass(frozen=True)
class Step:
    """One line of the arithmetic: ``name`` = ``arithmetic`` = ``result``, in ``unit``.
    ``source``: where its numbers come from."""

    name: str
    arithmetic: str
    result: float
    unit: str
    source: str


def steps(
    model: Model,
    settings: Settings,
    layout: Layout,
    weights: Weights | None,
    memory: Memory | None,
    pool: Pool | None,
    longest: int,
    built: Built | None = None,
) -> tuple[Step, ...]:
    """The arithmetic, from the configuration to the sequences that fit at once. ``longest``:
    tokens of the longest sequence that vLLM serves. ``built``: what vLLM's class makes of the
    model, where its layers are not known here."""
    return (
        *(_layers(model, settings) if built is None else _of_class(built)),
        *_blocks(layout, settings),
        *_memory(settings, weights, memory),
        *_pool(settings, layout, memory, pool, longest),
    )


def _layers(model: Model, settings: Settings) -> Iterator[Step]:
    yield from _tokens(model, settings)
    yield from _states(model, settings)
    yield _block_size(model, settings)


def _of_class(built: Built) -> Iterator[Step]:
    yield Step(
        "Of a token, all layers",
        f"{built.layers} layers of {built.architecture}",
        built.bytes_per_token,
        "bytes",
        f"what each layer of vLLM {built.release}'s class says that it keeps",
    )


def _tokens(model: Model, settings: Settings) -> Iterator[Step]:
    kinds: dict[Attention, int] = {}
    for layer in model.cached:
        if isinstance(layer, Attention):
            kinds[layer] = kinds.get(layer, 0) + 1
    plain = kv_element_bytes(model, settings)
    dtype = model.sources.get("dtype", "--dtype")
    if settings.kv_cache_dtype != "auto":
        dtype = "--kv-cache-dtype"
    elif model.cache_dtype is not None:
        dtype = model.sources.get("cache_dtype", dtype)
    where = ", ".join(
        f"{what}: {model.sources[what]}"
        for what in ("kv_heads", "head_size")
        if what in model.sources
    )
    total = []
    for layer, count in kinds.items():
        kept, width = layer.head_size + layer.value_size, layer.element_bytes or plain
        numbers = "one vector" if layer.latent else "keys and values"
        window = f", {layer.window:,} tokens at most" if layer.window else ""
        yield Step(
            f"Of a token, a layer ({numbers}{window})",
            f"{_heads(layer)} x {width} B",
            layer.kv_heads * kept * width,
            "bytes",
            f"{where}; {width} B: {dtype}",
        )
        total.append((count, layer.kv_heads * kept * width))
    if total:
        yield Step(
            "Of a token, all layers",
            " + ".join(f"{count} layers x {each:,}" for count, each in total),
            sum(count * each for count, each in total),
            "bytes",
            model.sources.get("layers", "--layers"),
        )


def _states(model: Model, settings: Settings) -> Iterator[Step]:
    for layer in dict.fromkeys(one for one in model.cached if isinstance(one, State)):
        found = shape(layer, model, settings)
        yield Step(
            f"Of a state, a layer ({layer.kind}) on a {settings.platform.device}",
            f"{found.inputs:,} x {found.input_bytes} B + "
            f"{found.elements:,} x {found.element_bytes} B",
            state_bytes(layer, model, settings),
            "bytes",
            f"inputs of the convolution + recurrent state; {_state_type(layer, settings)}",
        )


def _state_type(layer: State, settings: Settings) -> str:
    """Where the type of the recurrent state comes from."""
    platform = settings.platform
    if settings.state_dtype is not None:
        return f"the session's mamba_ssm_cache_dtype: {settings.state_dtype}"
    if layer.element_bytes is not None:
        return "the type that the model states"
    if platform.float32_states:
        return f"float32 on a {platform.device} {platform.about}"
    return f"the model's type on a {' '.join((platform.device, platform.about)).strip()}"


def _block_size(model: Model, settings: Settings) -> Step:
    """Tokens of a block, and why they are more than the settings ask for."""
    platform = settings.platform
    asked, found = asked_block_size(model, settings), block_size(model, settings)
    if found == asked:
        return Step(
            "Tokens of a block",
            f"{asked:,}",
            found,
            "tokens",
            f"--block-size; {platform.block_size} by default on a {platform.device}",
        )
    return Step(
        "Tokens of a block",
        f"as many as take a state, in multiples of {max(asked, platform.kernel_block):,}",
        found,
        "tokens",
        f"--block-size, and the {platform.kernel_block} of a {platform.device}'s kernels",
    )


def _heads(layer: Attention) -> str:
    if layer.latent:
        return f"{layer.head_size} numbers"
    if layer.head_size == layer.value_size:
        return f"2 x {layer.kv_heads} KV heads x {layer.head_size}"
    return f"{layer.kv_heads} KV heads x ({layer.head_size} + {layer.value_size})"


def _blocks(layout: Layout, settings: Settings) -> Iterator[Step]:
    for kind in dict.fromkeys(map(_kind_of, layout.groups)):
        alike = [group for group in layout.groups if _kind_of(group) == kind]
        yield Step(
            f"Of a block, a layer ({kind[0]}) on a {settings.platform.device}",
            _page(alike[0], settings),
            alike[0].page_bytes,
            "bytes",
            f"groups made by {layout.decided_by}",
        )
    largest = max(layout.bytes_per_block)
    widest = max(layout.groups, key=lambda group: group.layers * group.page_bytes)
    if len(layout.bytes_per_block) > 1:
        sizes = ", ".join(f"{size:,}" for size in layout.bytes_per_block)
        arithmetic = f"the largest of the stages' {sizes}"
    else:
        arithmetic = f"{widest.layers} layers of a group x {widest.page_bytes:,}"
    yield Step(
        f"Of a block of the pool, on a {settings.platform.device}",
        arithmetic,
        largest,
        "bytes",
        "one pool for all groups",
    )


def _kind_of(group: Group) -> tuple[str, int, int | None]:
    return (_KINDS[group.kind], group.block_size, group.window)


_KINDS = {
    "full": "all tokens",
    "latent": "all tokens, latent",
    "window": "within a window",
    "state": "a state",
    "chunked": "within a chunk",
    "cross": "what an encoder made",
}


def _page(group: Group, settings: Settings) -> str:
    """How the bytes of a block in one layer of this group are computed."""
    if group.token_bytes:
        device = settings.platform.device
        each = f"{group.token_bytes:,} B a token on a {device} x {group.block_size:,} tokens"
        plain = group.token_bytes * group.block_size
    else:
        each, plain = f"{group.state_bytes:,} B a state", group.state_bytes
    if settings.tensor_parallel > 1:
        each += f" (of {settings.tensor_parallel} {settings.platform.device}s)"
    return each if plain == group.page_bytes else f"{each}, padded to the other layers' blocks"


def _memory(settings: Settings, weights: Weights | None, memory: Memory | None) -> Iterator[Step]:
    if memory is None or weights is None:
        return
    device = settings.platform.device
    yield Step(
        f"Memory that vLLM may take of a {device}",
        f"{memory.gpu_bytes:,} x {settings.gpu_memory_utilization:g}",
        memory.requested_bytes,
        "bytes",
        f"{settings.gpu_source}; --gpu-memory-utilization",
    )
    gpus = settings.tensor_parallel * settings.pipeline_parallel
    where = f" of {gpus}, stage {memory.stage}" if settings.pipeline_parallel > 1 else f" of {gpus}"
    yield Step(
        f"Weights on a {device}",
        f"{weights.total_bytes:,}" + (f" over the {device}s, one{where}" if gpus > 1 else ""),
        memory.weight_bytes,
        "bytes",
        f"{'estimate: ' if weights.is_estimate else ''}{weights.source}",
    )
    yield Step(
        "Left for the KV cache",
        f"{memory.requested_bytes:,} - {memory.weight_bytes:,} - {memory.other_bytes:,}",
        memory.kv_bytes,
        "bytes",
        "what may be taken, less weights, less --other-memory",
    )


def _pool(
    settings: Settings, layout: Layout, memory: Memory | None, pool: Pool | None, longest: int
) -> Iterator[Step]:
    if pool is None:
        return
    if settings.blocks is not None:
        arithmetic, source = "given", "--num-gpu-blocks-override"
    elif settings.kv_bytes is not None:
        arithmetic = f"{settings.kv_bytes:,} / {max(layout.bytes_per_block):,}"
        source = "--kv-cache-memory-bytes / a block of the pool"
    else:
        left = memory.kv_bytes if memory else 0
        stage = memory.stage if memory else 0
        arithmetic = f"{left:,} / {layout.bytes_per_block[stage]:,}"
        source = "what is left / a block of the pool; one of them is the null block"
    yield Step("Blocks", arithmetic, pool.blocks, "blocks", source)
    for group in layout.groups:
        yield Step(
            f"Blocks of {longest:,} tokens ({_KINDS[group.kind]})",
            _held(group, longest, settings),
            group.blocks(longest, settings.in_flight_tokens),
            "blocks",
            "max_model_len",
        )
    needed = layout.blocks(longest, settings.in_flight_tokens)
    yield Step(
        f"Sequences of {longest:,} tokens at once",
        f"{pool.blocks:,} / {needed:,}",
        pool.max_concurrency,
        "sequences",
        "blocks / blocks of a sequence, all groups",
    )
    yield Step(
        "Tokens in the cache",
        f"{pool.max_concurrency:,.2f} x {longest:,}",
        pool.tokens,
        "tokens",
        "sequences at once x max_model_len",
    )


def _held(group: Group, longest: int, settings: Settings) -> str:
    """How the blocks of one sequence in this group are computed."""
    if group.kind == "cross":
        return f"{group.states:,} blocks of what an encoder made"
    if not group.token_bytes:
        return f"{group.states} states"
    if group.window is None:
        return f"{longest:,} / {group.block_size:,}, rounded up"
    in_flight = settings.in_flight_tokens
    if group.kind == "chunked":
        return f"({group.window:,} + {in_flight:,} in flight) / {group.block_size:,}, rounded up"
    return (
        f"({group.window:,} - 1 + {in_flight:,} in flight) / {group.block_size:,}, rounded up, + 1"
    )
