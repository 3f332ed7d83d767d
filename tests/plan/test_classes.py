# SPDX-License-Identifier: Apache-2.0
"""vLLM's own classes decide: what the process that asks them says equals what vLLM makes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.errors import RuleError
from analysis.plan import Plan, config, plan
from analysis.plan.built import Built
from analysis.plan.settings import Settings
from profilemate.commands import plan_classes
from profilemate.commands.plan_groups import Vllm
from profilemate.simulation import asking
from profilemate.simulation.classes import Asked, NotKnownError, RefusedError
from tests.analysis.invoke import invoke
from tests.plan.planned import model_of, settings_of
from tests.plan.truth import CASES, CONFIGS, MEMORY, Case, entries_of

ROOT = Path(__file__).parent.parent.parent
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
QUANTIZED = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8},
    "modelopt": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
}

RIGHT = {
    "falcon-7b": (8_192, 491_520),
    "starcoder-15b": (20_480, 196_608),
    "chatglm3-6b": (28_672, 140_434),
    "bloom-7b1": (491_520, 8_192),
    "command-r7b": (131_072, 122_880),
    "minimax-m2": (253_952, 15_855),
    "gemma-3-4b": (139_264, 196_608),
    "gemma-3-27b": (507_904, 49_152),
    "gemma-3n-e4b": (40_960, 491_520),
    "llama-4-scout": (196_608, 81_920),
    "deepseek-v3.2": (78_324, 12_852),
    "kimi-linear-48b": (8_064, 4_161),
    "whisper-large-v3": (163_840, 24_576),
}
"""Bytes that a token takes, and blocks that 60 GiB make, on one GPU."""

BILLIONS = {
    "starcoder-15b": 15.52,
    "falcon-7b": 6.92,
    "bloom-7b1": 7.07,
    "gemma-3n-e4b": 6.84,
    "command-r7b": 8.03,
}
"""Billions of numbers that the weights have."""


def entries(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def asked(name: str, changes: Mapping[str, Any] | None = None, **settings: Any) -> Asked:
    return Asked(config=json.dumps({**entries(name), **(changes or {})}), **settings)


def of_case(case: Case) -> Asked:
    return Asked(
        config=json.dumps(entries_of(case)),
        platform=case.platform,
        tensor_parallel=case.tensor,
        pipeline_parallel=case.pipeline,
        kv_cache_dtype=case.cache_dtype,
        prefix_caching=case.caching,
        hybrid=case.hybrid,
        batched_tokens=settings_of(case).batched_tokens,
        sizes=(case.block_size, 64),
    )


QUESTIONS = {
    **{str(case): of_case(case) for case in CASES},
    **{f"right {name}": asked(name) for name in RIGHT},
    **{
        f"llama {name}": asked("llama-3.1-8b", {"quantization_config": scheme})
        for name, scheme in QUANTIZED.items()
    },
    "llama sizes": asked("llama-3.1-8b", sizes=(None, 16, 32, 7)),
    "bge-m3": asked("bge-m3"),
    "heads": asked("falcon-h1-34b", tensor_parallel=8),
    "qwen": asked("qwen2.5-7b", tensor_parallel=8),
    "length": asked("gpt2", max_model_len=4096),
    "none": asked("gpt2", {"architectures": ["NoSuchForCausalLM"]}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """All questions, answered in one process, which imports vLLM once."""
    folder = tmp_path_factory.mktemp("classes")
    questions, out = folder / "questions", folder / "answers"
    questions.write_bytes(pickle.dumps(QUESTIONS))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_PROFILING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tests.plan.built", str(questions), str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: Mapping[str, Any] = pickle.loads(out.read_bytes())
    return found


def planned(answers: Mapping[str, Any], name: str, **settings: Any) -> Plan:
    """The plan of 60 GiB, by the answer alone: nothing of the model is read here."""
    built = answers[name]
    assert isinstance(built, Built), built
    model = replace(config.model(entries("gpt2"), "m"), layers=(), unknown="not known here")
    return plan(model, Settings(kv_bytes=MEMORY, **settings), ask=lambda _: built)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_layout_is_that_of_the_reading(case: Case, answers: Mapping[str, Any]) -> None:
    """Which ``test_vllm`` compares with what vLLM makes. So there is nothing to note."""
    built = answers[str(case)]
    assert isinstance(built, Built), built
    by_class = plan(model_of(case), settings_of(case), ask=lambda _: built)
    read = plan(model_of(case), settings_of(case))
    assert by_class.layout.groups == read.layout.groups
    assert by_class.layout.bytes_per_block == read.layout.bytes_per_block
    assert by_class.pool == read.pool
    assert [(one.name, one.result) for one in by_class.steps] == [
        (one.name, one.result) for one in read.steps
    ]
    assert by_class.bytes_per_token == read.bytes_per_token
    assert by_class.growing_bytes_per_token == read.growing_bytes_per_token
    assert by_class.notes[: len(read.notes)] == tuple(
        note for note in read.notes if "estimate" not in note
    )


@pytest.mark.parametrize("name", RIGHT)
def test_right_values(name: str, answers: Mapping[str, Any]) -> None:
    found = planned(answers, f"right {name}")
    assert found.pool is not None
    assert (found.bytes_per_token, found.pool.blocks) == RIGHT[name]


@pytest.mark.parametrize("name", sorted({*RIGHT} - {"kimi-linear-48b", "whisper-large-v3"}))
def test_right_values_without_vllm(name: str, answers: Mapping[str, Any]) -> None:
    """The reading of the config.json equals vLLM's class, groups and all; or it says that it does
    not know the model."""
    found = plan(config.model(entries(name), "m"), Settings(kv_bytes=MEMORY))
    assert found.pool is not None
    assert (found.bytes_per_token, found.pool.blocks) == RIGHT[name]
    built = answers[f"right {name}"]
    assert found.layout.groups == built.layout.groups
    assert found.max_model_len == built.max_model_len


@pytest.mark.parametrize("name", ["kimi-linear-48b", "whisper-large-v3"])
def test_what_only_the_class_knows(name: str) -> None:
    with pytest.raises(RuleError, match="Where vLLM is installed, its own classes know it"):
        config.model(entries(name), "m")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("falcon-h1-34b", {"tensor_parallel": 8}, "20 attention heads cannot be divided so"),
        ("qwen2.5-7b", {"tensor_parallel": 8}, "28 attention heads cannot be divided so"),
        ("gpt2", {"max_model_len": 4096}, "--max-model-len 4,096: vLLM refuses more than the 1,02"),
        ("deepseek-v3.2", {"kv_cache_dtype": "fp8"}, "whose 8-bit cache plan does not know"),
        ("deepseek-v3.2", {"block_size": 16}, "reads blocks of a multiple of 64 tokens"),
    ],
)
def test_refused_without_vllm(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        plan(config.model(entries(name), "m"), Settings(**settings))


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_choose_the_cache_without_vllm(name: str) -> None:
    changed = {**entries("llama-3.1-8b"), "quantization_config": QUANTIZED[name]}
    assert plan(config.model(changed, "m"), Settings()).bytes_per_token == 65_536
    plain = plan(config.model(changed, "m"), Settings(kv_cache_dtype="bfloat16"))
    assert plain.bytes_per_token == 131_072


@pytest.mark.parametrize("name", BILLIONS)
def test_right_weights_without_vllm(name: str) -> None:
    found = config.model(entries(name), "m").parameters
    assert found is not None
    assert found.total / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize("name", BILLIONS)
def test_right_weights(name: str, answers: Mapping[str, Any]) -> None:
    found = planned(answers, f"right {name}")
    assert found.model.parameters is not None
    assert found.model.parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)
    assert found.weights is not None
    assert not found.weights.is_estimate
    assert found.weights.total_bytes == pytest.approx(2 * found.model.parameters, rel=0.001)


def test_kinds_of_groups(answers: Mapping[str, Any]) -> None:
    """Llama 4: 12 of 48 layers keep all tokens, the others 8,192 and what is in flight. Whisper
    keeps what its encoder made of 2,048 tokens. DeepSeek's index and vectors share a block."""
    llama = planned(answers, "right llama-4-scout", max_num_batched_tokens=2048)
    assert [one.kind for one in llama.layout.groups] == ["chunked"] * 3 + ["full"]
    assert llama.layout.groups[0].blocks(10**6, 4096) == (8192 + 4096) // 16
    assert llama.layout.groups[0].blocks(100, 4096) == 7
    whisper = planned(answers, "right whisper-large-v3")
    assert [(one.kind, one.states) for one in whisper.layout.groups] == [
        ("full", 0),
        ("cross", 128),
    ]
    assert whisper.worst.blocks == 448 // 16 + 128
    (latent,) = planned(answers, "right deepseek-v3.2").layout.groups
    assert (latent.layers, latent.block_size) == (2 * 61, 64)
    assert latent.page_bytes == 64 * (1152 + 132) // 2


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_choose_the_cache(name: str, answers: Mapping[str, Any]) -> None:
    found = planned(answers, f"llama {name}")
    assert found.bytes_per_token == 65_536
    assert found.settings.kv_cache_dtype == "fp8"


def test_an_encoder_needs_none(answers: Mapping[str, Any]) -> None:
    with pytest.raises(
        RuleError, match=r"m needs no KV cache: no layer of vLLM .* XLMRobertaModel"
    ):
        planned(answers, "bge-m3")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("heads", r"attention heads \(20\) must be divisible by tensor parallel size \(8\)"),
        ("qwen", r"attention heads \(28\) must be divisible by tensor parallel size \(8\)"),
        ("length", r"max_model_len \(4096\) is greater than .*=1024"),
    ],
)
def test_what_vllm_refuses(name: str, said: str, answers: Mapping[str, Any]) -> None:
    assert isinstance(answers[name], RefusedError)
    with pytest.raises(RefusedError, match=said):
        raise answers[name]


def test_what_vllm_has_no_class_for(answers: Mapping[str, Any]) -> None:
    assert isinstance(answers["none"], NotKnownError)
    assert "no class for the architectures of the config.json (NoSuch" in str(answers["none"])
    assert "\n" not in str(answers["none"])


def test_sizes_of_a_block(answers: Mapping[str, Any]) -> None:
    """FlashAttention reads no blocks of 7 tokens."""
    rows = planned(answers, "llama sizes").by_block_size
    assert [(one.block_size, one.bytes_per_block) for one in rows] == [
        (16, 16 * 131_072),
        (32, 32 * 131_072),
    ]


def test_a_bound_in_time() -> None:
    with pytest.raises(NotKnownError, match=r"it takes longer than 0\.5 s"):
        asking.ask(asked("llama-3.1-8b"), bound_sec=0.5)


def test_a_bound_in_memory() -> None:
    with pytest.raises(NotKnownError):
        asking.ask(asked("llama-3.1-8b"), bound_bytes=64 << 20)


def test_layers_that_no_model_has_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(asked: Asked) -> Built:
        raise AssertionError(asked)

    monkeypatch.setattr(asking, "ask", fails)
    for deep in ({"n_layer": 10**6}, {"text_config": {"num_hidden_layers": 10**6}}):
        ask = plan_classes.asking({**entries("gpt2"), **deep}, Vllm(True), dtype=None)
        assert ask(Settings()) is None
    with pytest.raises(AssertionError):
        plan_classes.asking(entries("gpt2"), Vllm(True), dtype=None)(Settings())


def test_the_command(tmp_path: Path) -> None:
    """By default vLLM's class decides, and the plan says what would have been read without it."""
    changed = {**entries("llama-3.1-8b"), "num_key_value_heads": None, "num_kv_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    ended = invoke("plan", tmp_path, "--json", "--kv-cache-memory-bytes", "60GiB")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["layout"]["decided_by"].startswith("vLLM ")
    # The class knows no num_kv_heads, and takes as many as heads.
    assert found["bytes_per_token"] == 524_288
    assert "LlamaForCausalLM decides: a block takes 8,388,608 B. Without it" in found["notes"][-1]
    assert "would be read as 1,048,576 B." in found["notes"][-1]
    assert found["model"]["sources"]["parameters"].endswith("LlamaForCausalLM")
    refused = invoke("plan", CONFIGS / "gpt2.json", "--max-model-len", "4096")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "vLLM refuses: User-specified max_model_len (4096)" in refused.stderr
    assert refused.stderr.count("\n") == 1
