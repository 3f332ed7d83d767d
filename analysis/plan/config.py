# SPDX-License-Identifier: Apache-2.0
"""What does a config.json say about the layers of its model?

The names of the entries are Hugging Face's. Each model family reads them as vLLM's classes of
that family do; ``tests/plan`` builds these classes and compares. A configuration with a mechanism
that is not known here is refused: a plan without it would be wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.errors import RuleError
from analysis.plan import families, heads, lengths
from analysis.plan.entries import FILE, Config, said
from analysis.plan.model import MOST_LAYERS, Attention, Layer, Model, State
from analysis.plan.parameters import estimate, layer_letters
from analysis.plan.quantized import cache_dtype
from analysis.plan.sizes import element_bytes

_MOST_NAMED = 5
"""Entries that a sentence names."""

LARGEST_BYTES = 16 << 20
"""Larger than any model's config.json."""

_NOT_KNOWN = {
    "compress_ratios": "a compressed cache",
    "global_head_dim": "heads of several sizes",
    "num_global_key_value_heads": "heads of several sizes",
    "use_bidirectional_attention": "attention both ways",
    "block_configs": "layers of several shapes",
    "per_layer_config": "layers of several shapes",
    "linear_attn_config": "linear attention of another kind",
    "is_encoder_decoder": "an encoder's cache",
}
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
    "falcon": {"max_position_embeddings": 2048},
    "cohere2": {"sliding_window": 4096, "tie_word_embeddings": True},
}
"""What vLLM takes where a family's config.json leaves an entry out."""

_ENCODERS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert",
    "deberta",
    "deberta-v2",
    "electra",
    "mpnet",
    "modernbert",
    "nomic_bert",
    "new",
    "embedding_gemma2_text",
    "openai_privacy_filter",
    "siglip_text_model",
)
"""Families that keep nothing of a token: each is computed once, with all others."""

_OTHER_DTYPES = ("", "auto", "float32", "float", "float64", "double", "float8_e4m3fn")
"""What torch_dtype may be beside the types in which vLLM computes."""

_INDEX_ELEMENT_BYTES = 1
_INDEX_SCALE_BYTES = 4
"""A sparse attention's index keeps 8-bit numbers, and a scale for each 128 of them."""

_ALTERNATING = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6, "gemma3": 6}
"""Families whose every n-th layer attends to all tokens, and whose others have a window."""
_PLAIN_MAMBA = ("mamba", "mamba2", "falcon_mamba")


def read(path: str | os.PathLike[str], *, name: str | None = None) -> Model:
    """Read the model of a config.json, or of the folder that holds one.

    Raises:
        RuleError: the file is missing or is no JSON object; an entry is missing, makes no sense,
            or is not known here.

    """
    return model(entries(path), name or str(path))


def read_or_say(path: str | os.PathLike[str], *, name: str | None = None) -> Model:
    """The same; where the layers are not known here, a model without layers that says why.

    Raises:
        RuleError: the file is missing or is no JSON object.

    """
    found, named = entries(path), name or str(path)
    try:
        return model(found, named)
    except RuleError as error:
        return _outline(Config(found, named), str(error))


def entries(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries of a config.json, or of the one in a folder.

    Raises:
        RuleError: the file is missing or is no JSON object.

    """
    given = Path(path)
    file = given / FILE if os.path.isdir(given) else given
    # A pipe or a device may never end. Unlike Path's methods, os.path's do not raise on a path
    # that no system call takes.
    if os.path.exists(file) and not os.path.isfile(file):
        raise RuleError(f"{file} is no regular file; name a model's folder or its {FILE}")
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise RuleError(
                f"{file} is too large for a {FILE}; name a model's folder or its {FILE}"
            )
        found = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise RuleError(
            f"cannot read {file}: {error.strerror or error}; name a model's folder or its {FILE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RuleError(f"{file} is not JSON: {error}; name a model's {FILE}") from None
    if not isinstance(found, dict):
        raise RuleError(f"{file} is not a JSON object; name a model's {FILE}")
    return found


def _outline(config: Config, why: str) -> Model:
    """The model without its layers.

    Raises:
        RuleError: an entry makes no sense.

    """
    method, width = _quantization(config)
    return Model(
        name=config.name,
        dtype=_dtype(config),
        layers=(),
        max_model_len=None,
        parameters=None,
        quantization=method,
        quantized_bytes=width,
        sources=config.sources,
        unknown=why,
    )


def model(entries: Mapping[str, Any], name: str) -> Model:
    """The model that these entries of a config.json describe.

    Raises:
        RuleError: an entry is missing, makes no sense, or is not known here.

    """
    config = Config(entries, name)
    config.take_defaults(_DEFAULTS.get(config.family, {}))
    _refuse_unknown(config)
    count = config.whole("layers", "num_hidden_layers", "n_layer", "num_layers")
    if count > MOST_LAYERS:
        raise RuleError(f"{name}: {count:,} layers; a model has fewer")
    layers = tuple(_layer(config, number, count) for number in range(count))
    method, width = _quantization(config)
    length = lengths.longest(config)
    dtype, cache_dtype = _dtype(config), _cache_dtype(config)
    parameters = estimate(config, layers)
    return Model(
        name=name,
        dtype=dtype,
        layers=layers,
        heads=heads.count(config),
        cache_dtype=cache_dtype,
        max_model_len=length.default,
        most_model_len=length.most,
        doubt=_doubt(config),
        parameters=parameters,
        quantization=method,
        quantized_bytes=width,
        sources=config.sources,
    )


def _doubt(config: Config) -> str | None:
    """What to know of a plan of this model once all that plan reads has been read."""
    unread = config.unread()
    said_of_entries = (
        f"{FILE} has {', '.join(said(key) for key in unread[:_MOST_NAMED])}, which plan does not "
        "read: it may bear on the cache. Where vLLM is installed, its own class decides."
        if unread
        else None
    )
    doubts = filter(None, (families.doubt(config.shown_family), said_of_entries))
    return " ".join(doubts) or None


_INSTEAD = (
    ". Where vLLM is installed, its own classes know it; or give --layers, --kv-heads and "
    "--head-size of what it keeps"
)


def _refuse_unknown(config: Config) -> None:
    if config.family in _ENCODERS:
        raise RuleError(
            f"{config.name} needs no KV cache: {config.family} is an encoder. There is nothing to "
            "plan"
        )
    for key, what in _NOT_KNOWN.items():
        if config.get(key):
            raise RuleError(f"{config.name} has {what} ({key}), which plan does not know{_INSTEAD}")
    if config.family in _PLAIN_MAMBA:
        raise RuleError(f"{config.name} keeps no keys and values: there is nothing to plan")
    if config.count("kv_lora_rank") and config.family not in _LATENT:
        raise RuleError(
            f"{config.name} has latent attention (kv_lora_rank), which plan does not know in this "
            f"family{_INSTEAD}"
        )
    if config.count("index_topk") and config.family not in _LATENT:
        raise RuleError(
            f"{config.name} has a sparse attention's index (index_topk), which plan does not know "
            f"in this family{_INSTEAD}"
        )
    if config.numbers("attn_type_list") - {1}:
        raise RuleError(
            f"{config.name} has linear attention of another kind (attn_type_list), which plan does "
            f"not know{_INSTEAD}"
        )


def _layer(config: Config, number: int, count: int) -> tuple[Layer, ...]:
    """What layer ``number`` of ``count`` keeps."""
    if number >= count - config.count("num_kv_shared_layers"):
        return ()
    kind = _kind(config, number, count)
    if kind == "nothing":
        return ()
    if kind == "both":
        return (_attention(config, None), _mamba2(config))
    if kind == "state":
        return (_state(config),)
    kept = _attention(config, _window(config, number, count))
    if _is_chunked(config, number, count):
        return (replace(kept, window=config.count("attention_chunk_size"), chunked=True),)
    return (kept, *_index(config)) if kept.latent else (kept,)


def _is_chunked(config: Config, number: int, count: int) -> bool:
    """Whether the layer attends within chunks: in Llama 4, one with RoPE."""
    listed = config.words("layer_types", entries=count)
    is_listed = number < len(listed) and listed[number] == "chunked_attention"
    if is_listed:
        config.whole("chunk", "attention_chunk_size")
    if listed or not config.count("attention_chunk_size"):
        return is_listed
    if config.family != "llama4_text":
        raise RuleError(
            f"{config.name} has attention within chunks (attention_chunk_size), and does not say "
            f"in which layers{_INSTEAD}"
        )
    with_rope = config.words("no_rope_layers", entries=count)
    every = config.count("no_rope_layer_interval", default=4)
    return bool(with_rope[number]) if with_rope else (number + 1) % max(every, 1) != 0


def _index(config: Config) -> tuple[Attention, ...]:
    """What a sparse attention's index keeps beside the latent vector; nothing without one."""
    if not config.count("index_topk"):
        return ()
    size = config.whole("index_head_size", "index_head_dim")
    kept = size * _INDEX_ELEMENT_BYTES + -(-size // 128) * _INDEX_SCALE_BYTES
    return (Attention(1, kept, 0, latent=True, element_bytes=1),)


_LISTED = {
    "mamba": "state",
    "linear_attention": "state",
    "attention": "attention",
    "full_attention": "attention",
    "sliding_attention": "attention",
    "chunked_attention": "attention",
    "mlp": "nothing",
    "moe": "nothing",
}
_LETTERS = {"M": "state", "*": "attention", "-": "nothing", "E": "nothing"}
"""The letters of Nemotron-H's pattern."""


def _kind(config: Config, number: int, count: int) -> str:
    """What this layer keeps: ``attention`` (keys and values), ``state``, ``both`` or
    ``nothing``."""
    family = config.family
    pattern = layer_letters(config, count)
    if pattern:
        return _LETTERS[pattern[number]]
    if family == "falcon_h1":
        return "both"
    if family == "jamba":
        offset = config.count("attn_layer_offset", default=4)
        return _every(config.count("attn_layer_period", default=8), number - offset)
    listed = config.words("layer_types", "layers_block_type", entries=count)
    if number < len(listed):
        return _known(config, listed[number])
    if family == "qwen3_next":
        return _every(config.count("full_attention_interval", default=4), number + 1)
    if family == "nemotron_h":
        raise RuleError(
            f"{config.name} has no hybrid_override_pattern, which says what layers keep"
        )
    if family == "bamba":
        return "attention" if number in config.numbers("attn_layer_indices") else "state"
    return "attention"


def _every(period: int, number: int) -> str:
    """``attention`` for one layer of each period, ``state`` for the others."""
    return "attention" if number % max(1, period) == 0 else "state"


def _known(config: Config, word: Any) -> str:
    kind = _LISTED.get(word) if isinstance(word, str) else None
    if kind is None:
        raise RuleError(
            f"{config.name} has layers of a kind not known here ({said(word)}){_INSTEAD}"
        )
    return kind


def _attention(config: Config, window: int | None) -> Attention:
    each = heads.count(config)
    if config.family in _LATENT and config.get("kv_lora_rank"):
        rank = config.whole("kv_lora_rank", "kv_lora_rank")
        rope = config.whole("qk_rope_head_dim", "qk_rope_head_dim")
        config.sources["head_size"] = f"{FILE}: kv_lora_rank + qk_rope_head_dim"
        config.sources["kv_heads"] = "latent attention: one vector for all heads"
        return Attention(1, rank + rope, 0, window=window, latent=True)
    kv_heads = heads.kv_count(config, each)
    size = heads.size(config, each)
    return Attention(kv_heads, size, size, window=window)


def _window(config: Config, number: int, count: int) -> int | None:
    """Tokens of this layer's window; None where it attends to all tokens."""
    window = config.count("sliding_window")
    if not window:
        return None
    if config.family in ("cohere2", "cohere2_moe"):
        # A token sees so many before it, and itself.
        window += 1
    config.sources["window"] = f"{FILE}: sliding_window"
    listed = config.words("layer_types", entries=count)
    if number < len(listed):
        return window if listed[number] == "sliding_attention" else None
    if config.family in _ALTERNATING:
        every = config.count("sliding_window_pattern") or _ALTERNATING[config.family]
        return None if (number + 1) % every == 0 else window
    is_used = config.flag("use_sliding_window")
    if is_used is False:
        return None
    if is_used and number < config.count("max_window_layers"):
        return None
    return window


def _state(config: Config) -> State:
    family = config.family
    if family == "jamba":
        return _mamba1(config)
    if family == "qwen3_next":
        return _gated_delta_net(config)
    if family in ("nemotron_h", "granitemoehybrid", "bamba"):
        return _mamba2(config)
    raise RuleError(
        f"{config.name} keeps states of a kind not known here ({said(family)}){_INSTEAD}"
    )


def _mamba1(config: Config) -> State:
    inner = config.whole("hidden_size", "hidden_size") * config.whole("expand", "mamba_expand")
    return State(
        kind="Mamba",
        channels=inner,
        conv_steps=config.whole("conv", "mamba_d_conv") - 1,
        elements=inner * config.whole("state_size", "mamba_d_state"),
    )


def _mamba2(config: Config) -> State:
    heads = config.whole("mamba_heads", "mamba_n_heads", "mamba_num_heads")
    head = config.whole("mamba_head_size", "mamba_d_head", "mamba_head_dim")
    state = config.whole("state_size", "mamba_d_state", "ssm_state_size")
    return State(
        kind="Mamba 2",
        channels=config.count("mamba_d_ssm") or heads * head,
        conv_steps=config.whole("conv", "mamba_d_conv", "conv_kernel") - 1,
        elements=heads * head * state,
        state_groups=config.whole("mamba_groups", "mamba_n_groups", "n_groups"),
        state_size=state,
        element_bytes=_stated_element_bytes(config),
        checkpoints=1,
    )


def _stated_element_bytes(config: Config) -> int | None:
    """Bytes of one number of a state, where the model's family states a type for them."""
    if config.family != "nemotron_h":
        return None
    stated = config.text("mamba_ssm_cache_dtype") or "float32"
    return None if stated == "auto" else element_bytes(stated, "mamba_ssm_cache_dtype")


def _gated_delta_net(config: Config) -> State:
    keys = config.whole("linear_keys", "linear_num_key_heads")
    values = config.whole("linear_values", "linear_num_value_heads")
    key_size = config.whole("linear_key_size", "linear_key_head_dim")
    value_size = config.whole("linear_value_size", "linear_value_head_dim")
    return State(
        kind="gated delta net",
        channels=2 * keys * key_size + values * value_size,
        conv_steps=config.whole("conv", "linear_conv_kernel_dim") - 1,
        elements=values * value_size * key_size,
    )


def _dtype(config: Config) -> str:
    """The type that vLLM computes in. vLLM casts float32 weights to 16 bits."""
    name = config.text("torch_dtype", "dtype").removeprefix("torch.")
    name = "float16" if name == "half" else name
    if name in ("float16", "bfloat16"):
        config.sources["dtype"] = f"{FILE}: torch_dtype"
        return name
    if name not in _OTHER_DTYPES:
        raise RuleError(
            f"{config.name}: torch_dtype is {said(name)}, which is no type of weights; "
            "repair it, for example to bfloat16"
        )
    config.sources["dtype"] = "vLLM's choice for other types, from Ampere on"
    return "bfloat16"


def _cache_dtype(config: Config) -> str | None:
    """The type that quantized weights give to the cache; None for the model's."""
    found = cache_dtype(config.part("quantization_config", "compression_config"))
    if found is not None:
        config.sources["cache_dtype"] = f"{FILE}: quantization_config"
    return found


def _quantization(config: Config) -> tuple[str | None, float | None]:
    """How the weights are quantized, and the bytes of one quantized number, without its
    scales."""
    entries = config.part("quantization_config", "compression_config")
    if not entries:
        return None, None
    stated = Config(entries, f"{config.name}: quantization_config")
    method = stated.text("quant_method", "quantization_method") or "unknown"
    bits = stated.count("bits", "w_bit")
    widths = {"fp8": 1.0, "mxfp4": 4.25 / 8, "fbgemm_fp8": 1.0}
    if 0 < bits <= 16:
        return method, bits / 8
    return method, widths.get(method)
