# SPDX-License-Identifier: Apache-2.0
"""Configurations that no model has: entries of ``configs/`` replaced by odd values."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from random import Random
from typing import Any

from analysis.errors import RuleError
from analysis.plan import config, platforms
from analysis.plan import plan as plan_of
from analysis.plan.groups import Grouping, group
from analysis.plan.settings import Settings
from analysis.renderers import json as as_json
from analysis.renderers.text import plan as as_text
from tests.plan.truth import CONFIGS


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))

KEYS = _words(
    """
    attn_layer_indices attn_layer_offset attn_layer_period attn_type_list block_configs
    compression_config conv_kernel decoder_sparse_step dtype expert_layer_offset expert_layer_period
    first_k_dense_replace full_attention_interval head_dim hidden_size hybrid_override_pattern
    intermediate_size kv_lora_rank layer_types layers_block_type linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_dt_rank mamba_expand mamba_head_dim
    mamba_n_groups mamba_n_heads mamba_num_heads mamba_ssm_cache_dtype max_position_embeddings
    max_window_layers mlp_only_layers model_type moe_intermediate_size n_embd n_groups n_head
    n_inner n_layer n_positions n_routed_experts num_attention_heads num_experts num_hidden_layers
    num_key_value_heads num_kv_shared_layers num_local_experts q_lora_rank qk_nope_head_dim
    qk_rope_head_dim quantization_config sliding_window sliding_window_pattern ssm_state_size
    text_config tie_word_embeddings torch_dtype use_sliding_window v_head_dim vocab_size
    """
)


@cache
def _nested() -> Any:
    value: Any = 1
    for _ in range(500):
        value = [value] if len(str(value)) % 2 else {"text_config": value}
    return value


def _value(random: Random, before: Any) -> Any:
    """An odd value for an entry."""
    words = _words(
        "full_attention sliding_attention mamba attention moe linear_attention none 1 * M"
    )
    choices: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        7,
        random.randint(1, 300),
        10**9 - 1,
        10**9,
        2**63,
        10**400,
        1.5,
        -0.0,
        1e308,
        math.nan,
        math.inf,
        "",
        "32",
        "x" * 10_000,
        "\x1b[31m\u202e\n",
        "".join(random.choices("M*-E#", k=random.randint(0, 60))),
        [],
        [[]],
        [None],
        random.choices(words, k=random.randint(0, 60)),
        [random.randint(-1, 60) for _ in range(random.randint(0, 60))],
        [0] * 100_000,
        {},
        {"bits": random.choice([0, 4, -1, 2**63, "4", math.nan, None])},
        {"quant_method": random.choice(["fp8", "mxfp4", 4, None, ["fp8"], "\x1b[31m"])},
        {"num_hidden_layers": 2, "layer_types": ["mamba"]},
        random.choice(NAMES).partition("-")[0],
        random.choice(
            _words("jamba nemotron_h falcon_h1 qwen3_next bamba gemma2 gpt2 deepseek_v3")
        ),
        _nested(),
    ]
    if isinstance(before, int) and 1 < before < 10**9:
        choices += [str(before), float(before), [before], before + 1, before * 2, -before] * 3
    if isinstance(before, (list, str)):
        choices += [before[:-1], before[:1], before * 2, list(before)] * 3
    return random.choice(choices)


def entries(random: Random) -> dict[str, Any]:
    """The entries of some model with a few odd ones among them."""
    found = copy.deepcopy(_configs()[random.choice(NAMES)])
    inner = found.get("text_config")
    place = inner if isinstance(inner, dict) and random.random() < 0.5 else found
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        key = random.choice((*place, *place, *KEYS))
        if random.random() < 0.1:
            place.pop(key, None)
        else:
            place[key] = _value(random, place.get(key))
    return found


def plain() -> dict[str, Any]:
    """The entries of a model that there is."""
    return _configs()["llama-3.1-8b"]


@cache
def _configs() -> dict[str, dict[str, Any]]:
    return {name: json.loads((CONFIGS / f"{name}.json").read_text()) for name in NAMES}


def settings(random: Random) -> Settings:
    """Settings under which such a model is planned."""
    platform = random.choice(("gpu", "gpu", "cpu-basic", "cpu-amx"))
    return Settings(
        platform=platforms.named(platform),
        gpu_bytes=random.choice((None, 2**20, 80 * 2**30)),
        max_model_len=random.choice((None, None, 1, 8192, 10**9)),
        block_size=random.choice((None, None, 16, 1, 7)),
        tensor_parallel=random.choice((1, 1, 2, 3, 64)),
        pipeline_parallel=random.choice((1, 1, 2, 5, 64)),
        prefix_caching=random.random() < 0.7,
        hybrid=random.random() < 0.8,
        kv_bytes=random.choice((None, None, 0, 1, 60 * 2**30)),
        weight_bytes=random.choice((None, None, 0, 2**34)),
    )


def outcome(found: dict[str, Any], chosen: Settings, grouping: Grouping = group) -> str:
    """Plan it, and show the plan: returns ``planned``, or the refusal.

    Any other error than a refusal in one line is the caller's.
    """
    try:
        made = plan_of(
            config.model(found, "config.json"), chosen, average_len=100, grouping=grouping
        )
    except RuleError as error:
        text = str(error)
        assert text.isprintable(), text[:500]
        assert 20 < len(text) < 400, text[:500]
        return text
    as_json.render(made)
    shown = as_text.render(made, explained=True)
    assert all(char.isprintable() or char == "\n" for char in shown)
    return "planned"
