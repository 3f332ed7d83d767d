# SPDX-License-Identifier: Apache-2.0
"""How many numbers do a model's weights have, by its config.json?

The estimate is for models whose files are not on this machine. It counts the matrices, and leaves
out biases and norms of a few thousand numbers.
"""

from __future__ import annotations

from typing import Any

from analysis.plan.entries import Config
from analysis.plan.model import Layer, Parameters, State

_TWO_MATRICES = (
    "bloom",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "mpt",
    "nemotron_h",
    "opt",
    "phi",
    "starcoder2",
)
"""Families whose feed-forward part has no gate."""
_TIED = (
    "bloom",
    "cohere",
    "cohere2",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n_text",
    "gpt2",
    "gpt_bigcode",
    "mpt",
    "opt",
)
"""Families whose output head is the embedding, unless config.json says otherwise."""


def estimate(config: Config, layers: tuple[tuple[Layer, ...], ...]) -> Parameters | None:
    """How many numbers the weights have; None where config.json lacks the hidden size or the
    vocabulary."""
    hidden = _number(config, "hidden_size", "n_embd", "n_embed", "d_model")
    vocabulary = _number(config, "vocab_size", "padded_vocab_size")
    if not hidden or not vocabulary:
        return None
    dense = experts = 0
    for number, kept in enumerate(layers):
        dense += sum(_mixer(config, hidden, one) for one in kept or _shared(layers))
        plain, mixed = _feed_forward(config, hidden, number, len(layers))
        dense, experts = dense + plain, experts + mixed
    tied = config.flag("tie_word_embeddings")
    tied = config.family in _TIED if tied is None else tied
    positions = _number(config, "n_positions") or (
        _number(config, "max_position_embeddings") if config.family == "opt" else 0
    )
    embedding = (vocabulary + positions) * hidden
    # Gemma 3n has an embedding for each layer, too.
    each = _number(config, "hidden_size_per_layer_input")
    embedding += _number(config, "vocab_size_per_layer_input") * each * len(layers)
    return Parameters(embedding, 0 if tied else vocabulary * hidden, dense, experts)


def _shared(layers: tuple[tuple[Layer, ...], ...]) -> tuple[Layer, ...]:
    """What a layer would keep that uses another one's; it has its matrices all the same. Nothing
    where layers that keep nothing have no attention."""
    kept = [layer for layer in layers if layer]
    keeps = bool(layers and layers[0]) and all(not layer for layer in layers[len(kept) :])
    return kept[-1] if keeps else ()


def _mixer(config: Config, hidden: int, kept: Layer) -> int:
    """How many numbers have the matrices that make what a layer keeps, and that use it."""
    if isinstance(kept, State):
        return _state(config, hidden, kept)
    heads = _number(config, "num_attention_heads", "n_head", "n_heads")
    if kept.element_bytes:
        # A sparse attention's index: what it asks for, and one key.
        size = _number(config, "index_head_dim")
        asked = _number(config, "index_n_heads") * size
        return _number(config, "q_lora_rank") * asked + hidden * size
    if kept.latent:
        return _latent(config, hidden, heads)
    gate = 2 if config.family == "qwen3_next" else 1
    query = heads * kept.head_size
    return hidden * (gate * query + query + kept.kv_heads * (kept.head_size + kept.value_size))


def _latent(config: Config, hidden: int, heads: int) -> int:
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    nope, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    low = _number(config, "q_lora_rank")
    query = heads * (nope + rope)
    ask = hidden * low + low * query if low else hidden * query
    return ask + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _state(config: Config, hidden: int, kept: State) -> int:
    conv = kept.channels + 2 * kept.state_groups * kept.state_size
    if kept.kind == "Mamba":
        rank = _number(config, "mamba_dt_rank")
        state = kept.elements // kept.channels
        return kept.channels * (3 * hidden + 2 * rank + 3 * state + kept.conv_steps + 1)
    if kept.kind == "Mamba 2":
        heads = _number(config, "mamba_n_heads", "mamba_num_heads")
        return hidden * (kept.channels + conv + heads) + kept.channels * hidden
    values = _number(config, "linear_num_value_heads")
    value = values * _number(config, "linear_value_head_dim")
    return hidden * (kept.channels + value + 2 * values) + value * hidden


def _feed_forward(config: Config, hidden: int, number: int, count: int) -> tuple[int, int]:
    """How many numbers a layer's feed-forward part has outside of experts, and in experts."""
    matrices = 2 if config.family in _TWO_MATRICES else 3
    inner = _inner(config, number) or 4 * hidden
    pattern = layer_letters(config, count)
    if pattern:
        return (matrices * hidden * inner if pattern[number] == "-" else 0), 0
    count = _experts(config, number)
    if not count:
        return matrices * hidden * inner, 0
    each = matrices * hidden * (_number(config, "moe_intermediate_size") or inner)
    shared = _number(config, "n_shared_experts") * each
    shared += (
        matrices
        * hidden
        * _number(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    )
    return shared + hidden * count, count * each


def _inner(config: Config, number: int) -> int:
    """The width of a layer's feed-forward part; 0 where it is not stated."""
    stated: Any = config.get("intermediate_size")
    if isinstance(stated, list) and number < len(stated):
        one = stated[number]
        return one if isinstance(one, int) and 0 < one < 10**9 else 0
    return _number(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


def _experts(config: Config, number: int) -> int:
    """How many experts this layer has."""
    count = _number(config, "n_routed_experts", "num_local_experts", "num_experts")
    period = _number(config, "expert_layer_period", "moe_layer_freq", "decoder_sparse_step") or 1
    offset = _number(config, "expert_layer_offset")
    if number < _number(config, "first_k_dense_replace"):
        return 0
    if number in config.numbers("mlp_only_layers"):
        return 0
    if config.family.startswith("qwen"):
        offset = period - 1
    return count if count > 1 and number % period == offset else 0


def layer_letters(config: Config, layers: int) -> str:
    """The letter of each layer in Nemotron-H's pattern; empty where there is no pattern."""
    return config.letters("hybrid_override_pattern", "M*-E", layers)


def _number(config: Config, *keys: str) -> int:
    """The number of the first of these keys that has an entry; 0 where it is no number."""
    value: Any = config.get(*keys)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 < value < 10**9 else 0
