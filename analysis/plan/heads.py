# SPDX-License-Identifier: Apache-2.0
"""How many KV heads has a layer, and how large is a head?

The entries have many spellings. These are those that vLLM's own code of configurations reads
(``transformers_utils/model_arch_config_convertor.py``), and how families change their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping

from analysis.errors import RuleError
from analysis.plan.entries import FILE, Config

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEAD_SIZE = ("head_dim", "attention_head_dim", "hidden_size_per_head", "kv_channels")

_ONE_QUERY = ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode")
"""Families whose ``multi_query`` means one KV head for all heads."""

_OTHER_MEANING: Mapping[str, tuple[str, ...]] = {
    "dbrx": ("attn_config",),
    "mpt": ("attn_config",),
}
"""Families that keep the heads in an entry of their own."""


def count(config: Config) -> int:
    """How many heads a layer has.

    Raises:
        RuleError: there is no such entry, or it makes no sense.

    """
    return config.whole("heads", *HEADS)


def kv_count(config: Config, heads: int) -> int:
    """How many KV heads a layer has.

    Raises:
        RuleError: an entry makes no sense, or more than one says how many, and they differ.

    """
    family = config.family
    if family in _ONE_QUERY and config.flag("multi_query") is not False:
        # Of Falcon's newer models only the number counts.
        is_newer = config.flag("new_decoder_architecture") is True
        if not is_newer and (config.flag("multi_query") or family == "gpt_bigcode"):
            config.sources["kv_heads"] = f"{FILE}: multi_query"
            return 1
    if family in _OTHER_MEANING:
        inner = Config(config.part(*_OTHER_MEANING[family]), config.name)
        found = inner.whole("kv_heads", "kv_n_heads", default=heads)
        config.sources["kv_heads"] = f"{FILE}: attn_config.kv_n_heads"
        return found
    if family == "chatglm" and config.flag("multi_query_attention") is False:
        config.sources["kv_heads"] = f"as many as heads: {config.sources['heads']}"
        return heads
    said = {key: config.whole("kv_heads", key) for key in _KV_HEADS if config.get(key) is not None}
    if len(set(said.values())) > 1:
        shown = ", ".join(f"{key}: {value}" for key, value in said.items())
        raise RuleError(
            f"{config.name} says more than once how many KV heads there are ({shown[:100]}); give "
            "--layers, --kv-heads and --head-size in its place"
        )
    found = config.whole("kv_heads", *_KV_HEADS, default=heads)
    if heads % found:
        raise RuleError(
            f"{config.name}: {heads:,} heads cannot share {found:,} KV heads evenly, which vLLM "
            "needs; repair the entries"
        )
    config.sources.setdefault("kv_heads", f"as many as heads: {config.sources['heads']}")
    return found


def size(config: Config, heads: int) -> int:
    """How many numbers a head keeps for a token's key, and as many for its value.

    Raises:
        RuleError: an entry makes no sense.

    """
    if config.get(*_HEAD_SIZE) is not None and config.count(*_HEAD_SIZE):
        return config.whole("head_size", *_HEAD_SIZE)
    hidden = config.whole("hidden_size", *_HIDDEN)
    found = hidden // heads
    if not found:
        raise RuleError(f"{config.name}: {heads:,} heads do not fit in a hidden size of {hidden:,}")
    config.sources.setdefault("head_size", f"{config.sources['hidden_size']} / heads")
    return found
