# SPDX-License-Identifier: Apache-2.0
"""A config.json that no model has is planned, or refused in one line, and soon."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.errors import RuleError
from analysis.plan import config
from analysis.plan import plan as plan_of
from analysis.plan.settings import Settings
from tests.analysis.invoke import invoke
from tests.plan import odd
from tests.plan.truth import CONFIGS


@given(st.integers(0, 2**64))
@settings(max_examples=150, deadline=None)
def test_any_config_is_planned_or_refused(seed: int) -> None:
    random = Random(seed)
    began = time.monotonic()
    odd.outcome(odd.entries(random), odd.settings(random))
    assert time.monotonic() - began < 20


def refusal(name: str, chosen: Settings, **changes: Any) -> str:
    entries = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    with pytest.raises(RuleError) as caught:
        plan_of(config.model(entries, "config.json"), chosen)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 300
    return text


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("nemotron-h-8b", {"hybrid_override_pattern": "*"}, "has 1 entries; it needs one for each"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M" * 9}, "has 9 entries; it needs one"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M#" * 26}, "not a text of the letters M*-E"),
        (
            "nemotron-h-8b",
            {"hybrid_override_pattern": 3},
            "hybrid_override_pattern is 3, not a text",
        ),
        ("nemotron-h-8b", {"hybrid_override_pattern": ""}, "has no hybrid_override_pattern"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "-" * 52}, "no layer of config.json keeps"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; it needs"),
        ("gpt-oss-20b", {"layer_types": "full"}, "layer_types is 'full', not a list"),
        ("gpt-oss-20b", {"layer_types": [[]] * 24}, "layers of a kind not known here ("),
        (
            "gpt-oss-20b",
            {"layer_types": [0] * 10**6},
            "is a list with 1,000,000 entries, not a list",
        ),
        (
            "llama-3.1-8b",
            {"num_key_value_heads": 0},
            "num_key_value_heads is 0, not a whole number",
        ),
        ("llama-3.1-8b", {"num_key_value_heads": 2**63}, "is 9223372036854775808, not a whole"),
        ("llama-3.1-8b", {"num_key_value_heads": 10**5000}, "is a number of more than 60 digits"),
        ("llama-3.1-8b", {"hidden_size": float("nan")}, "hidden_size is nan, not a whole number"),
        ("llama-3.1-8b", {"hidden_size": "\x1b[31m" * 99}, "hidden_size is '\\x1b[31m"),
        ("llama-3.1-8b", {"head_dim": {}}, "head_dim is an object with 0 entries, not a whole"),
        ("llama-3.1-8b", {"num_hidden_layers": 1001}, "1,001 layers; a model has fewer"),
        (
            "nemotron-h-8b",
            {"model_type": "\x1b[31m\n" + "x" * 999},
            "states of a kind not known here ('\\x1b[31m\\nxxx",
        ),
        (
            "nemotron-h-8b",
            {"mamba_ssm_cache_dtype": "\x1b[31m\n" + "x" * 999},
            "mamba_ssm_cache_dtype '\\x1b[31m\\nxxx",
        ),
        ("llama-3.1-8b", {"text_config": 7}, "text_config is 7, not an object"),
        ("llama-3.1-8b", {"model_type": ["llama"]}, "model_type is a list with 1 entries"),
        ("llama-3.1-8b", {"torch_dtype": 16}, "torch_dtype is 16, not a text"),
        ("llama-3.1-8b", {"torch_dtype": "float99"}, "torch_dtype is 'float99', which is no type"),
        ("llama-3.1-8b", {"num_key_value_heads": 3}, "32 heads cannot share 3 KV heads evenly"),
        ("llama-3.1-8b", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or"),
        ("mistral-7b-v0.1", {"sliding_window": "4096"}, "sliding_window is '4096', not a whole"),
        (
            "mistral-7b-v0.1",
            {"sliding_window": -1},
            "sliding_window is -1, not a whole number, 0 or",
        ),
        ("mistral-7b-v0.1", {"sliding_window": 10**9}, "sliding_window is 1000000000, not a whole"),
        ("qwen3-next-80b-a3b", {"mlp_only_layers": [0.5]}, "a list with 1 entries, not a list of"),
        ("deepseek-v3", {"quantization_config": []}, "quantization_config is a list with 0"),
        ("deepseek-v3", {"quantization_config": {"bits": "4"}}, "bits is '4', not a whole number"),
    ],
)
def test_the_refusal_names_the_key_and_what_it_needs(
    name: str, changes: dict[str, Any], says: str
) -> None:
    assert says in refusal(name, Settings(), **changes)


def test_a_stage_that_keeps_nothing_is_refused() -> None:
    pattern = "*" + "-" * 51
    said = refusal("nemotron-h-8b", Settings(pipeline_parallel=2), hybrid_override_pattern=pattern)
    assert said.startswith("--pipeline-parallel-size 2: no layer of stage 1 keeps anything")


def test_files_that_no_model_has(tmp_path: Path) -> None:
    """By the command: one line, exit code 2, and no traceback."""
    path = tmp_path / "config.json"
    for content, says in (
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 5_000 + b"}", "is not JSON"),
        (b'{"a": "' + b"x" * config.LARGEST_BYTES + b'"}', "is too large for a config.json"),
        (b"{}", "has no num_hidden_layers"),
        (b'{"num_hidden_layers": NaN}', "num_hidden_layers is nan"),
    ):
        path.write_bytes(content)
        done = invoke("plan", path, "--gpu", "80GiB", "--without-vllm")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert says in line
        assert len(line) < 400
