# SPDX-License-Identifier: Apache-2.0
"""A config.json is read as its family means it, or refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from analysis.errors import RuleError
from analysis.plan import config, local, plan
from analysis.plan.model import Attention, Model
from analysis.plan.settings import Settings
from tests.plan.truth import CONFIGS


def entries(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


def refusal(name: str, **changes: Any) -> str:
    with pytest.raises(RuleError) as caught:
        config.model(entries(name, **changes), "config.json")
    text = str(caught.value)
    assert "\n" not in text
    return text


def windows(model: Model) -> list[int | None]:
    return [one.window for one in model.cached if isinstance(one, Attention)]


def test_where_each_number_comes_from() -> None:
    model = config.model(entries("llama-3.1-8b"), "config.json")
    assert model.sources["kv_heads"] == "config.json: num_key_value_heads"
    assert model.sources["head_size"] == "config.json: hidden_size / heads"
    assert model.sources["layers"] == "config.json: num_hidden_layers"


def test_as_many_kv_heads_as_heads() -> None:
    model = config.model(entries("gpt2"), "config.json")
    assert model.cached[0] == Attention(12, 64, 64)
    assert model.sources["kv_heads"] == "as many as heads: config.json: n_head"


def test_the_text_of_a_model_that_sees() -> None:
    """The layers of a multimodal model are those of its text_config."""
    text = entries("llama-3.1-8b")
    model = config.model({"model_type": "mllava", "text_config": text}, "config.json")
    assert len(model.cached) == 32
    assert model.max_model_len == 131_072


def test_every_sixth_layer_keeps_all() -> None:
    found = windows(config.model(entries("gemma-3-1b"), "config.json"))
    assert [number for number, window in enumerate(found) if window is None] == [5, 11, 17, 23]


def test_a_window_that_is_not_used() -> None:
    assert set(windows(config.model(entries("qwen2.5-7b"), "config.json"))) == {None}


def test_a_window_from_some_layer_on() -> None:
    """max_window_layers is the first layer that has one."""
    changed = entries(
        "qwen2.5-7b", use_sliding_window=True, sliding_window=4096, max_window_layers=20
    )
    assert windows(config.model(changed, "config.json")) == [None] * 20 + [4096] * 8


def test_layers_that_use_another_layers_cache() -> None:
    """The last 10 keep nothing of their own."""
    model = config.model(entries("llama-3.1-8b", num_kv_shared_layers=10), "config.json")
    assert len(model.cached) == 22
    assert len(model.layers) == 32


def test_a_family_that_was_not_compared_is_said() -> None:
    for family, is_said in (("llama", False), ("new_thing", True), ("a b\x1b", True)):
        changed = entries("llama-3.1-8b", model_type=family)
        found = plan(config.model(changed, "config.json"), Settings(blocks=9)).notes
        assert any("was not compared with vLLM's class" in note for note in found) == is_said
        assert all(note.isprintable() for note in found)


def test_weights_in_float32_are_cast() -> None:
    model = config.model(entries("gpt2", torch_dtype="float32"), "config.json")
    assert model.dtype == "bfloat16"
    assert config.model(entries("gpt2", torch_dtype="half"), "config.json").dtype == "float16"


def test_an_entry_that_may_bear_on_the_cache_is_named() -> None:
    changed = entries("llama-3.1-8b", kv_cache_groups=4, latent_size=0, use_cache=True, qkv_bias=1)
    model = config.model(changed, "config.json")
    assert model.doubt is not None
    assert model.doubt.startswith("config.json has 'kv_cache_groups', which plan does not read")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_published_entries_are_all_read_or_known(path: Path) -> None:
    try:
        model = config.model(json.loads(path.read_text()), "config.json")
    except RuleError:
        return
    assert "does not read" not in (model.doubt or "")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', not a whole number from 1 on"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**6}, "1,000,000 layers"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"index_topk": 2048}, "has a sparse attention's index (index_topk)"),
        ({"attention_chunk_size": 8192}, "has attention within chunks"),
        ({"num_kv_heads": 4}, "says more than once how many KV heads there are (num_kv_heads: 4"),
        ({"attn_type_list": [1, 0]}, "has linear attention of another kind (attn_type_list)"),
        ({"model_type": "bert"}, "needs no KV cache: bert is an encoder"),
        ({"model_type": "mamba2"}, "keeps no keys and values"),
        ({"layer_types": ["linear_attention"] * 32}, "keeps states of a kind not known here"),
        (
            {"layer_types": ["chunked_attention"] * 32},
            "has no attention_chunk_size",
        ),
        ({"num_kv_shared_layers": "all"}, "num_kv_shared_layers is 'all', not a whole number"),
        ({"hidden_size": 31}, "32 heads do not fit in a hidden size of 31"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], says: str) -> None:
    assert says in refusal("llama-3.1-8b", **changes)


def test_files_that_are_none(tmp_path: Path) -> None:
    for content, says in (("{", "is not JSON"), ("[1]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(RuleError, match=says):
            config.read(tmp_path)
    with pytest.raises(RuleError, match="cannot read"):
        config.read(tmp_path / "other.json")
    with pytest.raises(RuleError, match="cannot read"):
        config.read(CONFIGS)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(RuleError, match="is no regular file"):
        config.read(tmp_path / "pipe.json")


@pytest.mark.parametrize("odd", [{"a": 1}, [1], "8", float("inf"), float("nan"), -1, True])
def test_what_is_no_number_does_not_count(odd: object) -> None:
    """Of entries that only the estimate of the weights reads."""
    plain = config.model(entries("llama-3.1-8b"), "config.json").parameters
    assert (
        config.model(entries("llama-3.1-8b", n_shared_experts=odd), "config.json").parameters
        == plain
    )
    assert config.model(entries("llama-3.1-8b", vocab_size=odd), "config.json").parameters is None


def test_a_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was downloaded is found; nothing is downloaded."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    with pytest.raises(RuleError, match="not among the models"):
        local.find("some/model")
    (snapshot / "config.json").write_text(json.dumps(entries("gpt2")))
    assert local.find("some/model") == snapshot
    with pytest.raises(RuleError, match="there is no xxx"):
        local.find("x" * 5000)
    with pytest.raises(RuleError, match="there is no nothing-here"):
        local.find("nothing-here")
