# SPDX-License-Identifier: Apache-2.0
"""The numbers that people work out by hand, and those that the documentation of vLLM and courses
about it print."""

from __future__ import annotations

import pytest

from analysis.errors import RuleError
from analysis.plan import Plan, config, plan
from analysis.plan.model import Attention, Model, State
from analysis.plan.settings import Settings
from analysis.plan.specs import stages
from tests.plan.truth import CONFIGS

GIB = 2**30


def named(name: str) -> Model:
    return config.read(CONFIGS / f"{name}.json")


def planned(name: str, **settings: object) -> Plan:
    return plan(named(name), Settings(**settings))  # type: ignore[arg-type]


def length_of(found: Plan, tokens: int) -> tuple[int, int, float | None]:
    one = next(one for one in found.by_length if one.tokens == tokens)
    return one.blocks, one.kv_bytes, one.last_block_used


def test_gpt2() -> None:
    """2 x 12 heads x 64 x 2 bytes = 3,072, by 12 layers and 1,024 tokens."""
    found = planned("gpt2")
    assert found.bytes_per_token == 12 * 3072
    assert found.layout.groups[0].token_bytes == 3072
    assert found.worst.kv_bytes == 37_748_736


def test_llama_3_1_8b() -> None:
    """2 x 8 heads x 128 x 2 bytes x 32 layers = 131,072."""
    found = planned("llama-3.1-8b")
    assert found.bytes_per_token == 131_072
    sizes = [length_of(found, tokens * 1024)[1] for tokens in (4, 16, 32, 64)]
    assert sizes == [GIB // 2, 2 * GIB, 4 * GIB, 8 * GIB]


def test_opt_125m() -> None:
    found = planned("opt-125m", blocks=8788)
    assert found.bytes_per_token == 36_864
    assert found.layout.bytes_per_block == (589_824,)
    assert found.pool is not None
    assert found.pool.tokens == 140_608
    assert found.pool.max_concurrency == 68.65625
    # 69 x 128 = 8,832 blocks, of which one is the null block: 68 whole sequences.
    assert planned("opt-125m", blocks=8832).worst.users == 68


def test_the_last_block() -> None:
    found = plan(named("opt-125m"), Settings(), average_len=2050)
    assert found.average is not None
    assert found.average.blocks == 129
    assert found.average.last_block_used == 0.125


@pytest.mark.parametrize(("tokens", "blocks"), [(2048, 128), (4096, 256), (8192, 512)])
def test_blocks_by_max_model_len(tokens: int, blocks: int) -> None:
    found = planned("llama-3.1-8b", max_model_len=tokens)
    assert found.worst.tokens == tokens
    assert found.worst.blocks == blocks
    assert found.worst.last_block_used == 1


def test_memory_goes_to_weights_first() -> None:
    """80 GiB x 0.9 - 16 GiB - 4 GiB = 52 GiB: 26,624 blocks of 2 MiB, 425,984 tokens."""
    found = planned(
        "llama-3.1-8b",
        gpu_bytes=80 * GIB,
        gpu_memory_utilization=0.9,
        weight_bytes=16 * GIB,
        other_bytes=4 * GIB,
        max_model_len=8192,
    )
    assert found.memory is not None
    assert found.memory.kv_bytes == 52 * GIB
    assert found.pool is not None
    assert found.pool.blocks == 26_624
    assert found.pool.tokens == 425_984
    assert found.pool.max_concurrency == 52
    half = next(one for one in found.by_utilization if one.gpu_memory_utilization == 0.5)
    assert half.kv_bytes == 20 * GIB
    assert half.pool is not None
    assert half.pool.blocks == 10_240
    wide = next(one for one in found.by_block_size if one.block_size == 64)
    assert (wide.bytes_per_block, wide.blocks, wide.length.blocks) == (8 * 2**20, 6656, 128)


def test_fewer_heads_than_gpus_are_repeated() -> None:
    """8 heads on 16 GPUs: one each, as on 8."""
    on_8 = planned("llama-3.1-70b", tensor_parallel=8)
    on_16 = planned("llama-3.1-70b", tensor_parallel=16)
    assert on_8.layout.bytes_per_block == on_16.layout.bytes_per_block == (80 * 16 * 512,)


def test_heads_that_gpus_cannot_share_are_refused() -> None:
    with pytest.raises(RuleError, match="32 attention heads cannot be divided so"):
        planned("llama-3.1-8b", tensor_parallel=3)


def test_latent_attention_is_on_every_gpu() -> None:
    """(512 + 64) x 2 bytes x 61 layers, whatever the number of GPUs."""
    for gpus in (1, 8):
        found = planned("deepseek-v3", tensor_parallel=gpus)
        assert found.layout.bytes_per_block == (576 * 2 * 61 * 16,)


def test_fp8_halves_a_block() -> None:
    assert planned("llama-3.1-8b", kv_cache_dtype="fp8").layout.bytes_per_block == (2**20,)


def test_a_window_is_kept_and_what_is_in_flight() -> None:
    """4,095 + 2 x 2,048 tokens = 8,191, in 512 blocks, and one for where it begins."""
    found = planned("mistral-7b-v0.1", max_num_batched_tokens=2048, in_flight_batches=2)
    assert found.worst.tokens == 32_768
    assert found.worst.blocks == 513
    assert found.growing_bytes_per_token == 0


def test_stages_get_layers_as_vllm_divides_them() -> None:
    """26 layers on 4 stages: 6, 7, 7 and 6, the last one spared."""
    found = stages(named("gemma-3-1b"), Settings(pipeline_parallel=4))
    assert [len(stage) for stage in found] == [6, 7, 7, 6]


def test_the_fullest_stage_decides() -> None:
    found = planned(
        "llama-3.1-70b", pipeline_parallel=3, gpu_bytes=80 * GIB, gpu_memory_utilization=1.0
    )
    assert found.memory is not None
    assert found.weights is not None
    made = [
        (80 * GIB - weights) // size
        for weights, size in zip(
            found.weights.stage_bytes, found.layout.bytes_per_block, strict=True
        )
    ]
    assert found.pool is not None
    assert found.pool.blocks == min(made) == made[found.memory.stage] < max(made)


def test_what_does_not_fit_is_said() -> None:
    """1,025 blocks without the null block hold 16,384 tokens, not 131,072."""
    found = planned("llama-3.1-8b", blocks=1025)
    assert found.pool is not None
    assert found.pool.longest == 16_384
    assert any("--max-model-len 16384 does" in note for note in found.notes)
    nothing = planned("llama-3.1-8b", blocks=1)
    assert any("does not fit. No length does." in note for note in nothing.notes)
    too_small = planned("llama-3.1-70b", gpu_bytes=80 * GIB)
    assert too_small.pool is None
    assert any("none is left for the KV cache" in note for note in too_small.notes)


def test_a_state_takes_a_block_whatever_the_length() -> None:
    """Jamba: 28 of 32 layers keep 311,296 bytes (8,192 x 3 x 2 + 8,192 x 16 x 2): 76 tokens of
    4,096 bytes, 80 in whole kernel blocks. 7 groups of states, 2 each, and 13 of 1,024 tokens."""
    found = planned("jamba-v0.1", max_model_len=1024)
    kinds = [one.kind for one in found.layout.groups]
    assert kinds == ["state"] * 7 + ["full"]
    assert {one.block_size for one in found.layout.groups} == {80}
    assert {one.page_bytes for one in found.layout.groups} == {80 * 4096}
    assert found.worst.blocks == 7 * 2 + 13


def test_a_sequence_that_is_not_served_is_said() -> None:
    said = "vLLM would refuse a sequence of 131,073 tokens: --max-model-len is 131,072."
    model = named("llama-3.1-8b")
    assert said in plan(model, Settings(blocks=9), worst_len=131_073).notes
    assert said in plan(model, Settings(blocks=9), average_len=131_073).notes
    assert said not in plan(model, Settings(blocks=9), worst_len=131_072).notes


def test_states_alone() -> None:
    """A block holds a state, and no size of a block in tokens changes that."""
    state = State("Mamba", channels=10, conv_steps=3, elements=160)
    found = plan(_model([state]), Settings(blocks=9))
    assert found.worst.blocks == 2
    assert [one.effective for one in found.by_block_size] == [16]


def test_unlike_layers_share_a_size_of_block() -> None:
    """Heads of 128 in three layers, of 64 in three with a window: blocks of 16 and of 32."""
    model = _model([Attention(4, 128, 128)] * 3 + [Attention(4, 64, 64, window=256)] * 3)
    groups = plan(model, Settings()).layout.groups
    assert [(one.kind, one.block_size, one.page_bytes) for one in groups] == [
        ("full", 16, 32_768),
        ("window", 32, 32_768),
    ]


def test_a_size_that_does_not_divide_is_padded() -> None:
    model = _model([Attention(3, 128, 128), Attention(2, 128, 128, window=256)])
    groups = plan(model, Settings()).layout.groups
    assert [(one.block_size, one.page_bytes) for one in groups] == [(16, 24_576), (16, 24_576)]


def test_groups_are_not_split_for_a_layer_more() -> None:
    """13 and 12 layers: two groups of up to 13, and not 12, 12 and 1."""
    layers = [Attention(4, 128, 128)] * 13 + [Attention(4, 128, 128, window=256)] * 12
    found = plan(_model(layers), Settings())
    assert [one.layers for one in found.layout.groups] == [13, 12]
    assert found.layout.bytes_per_block == (13 * 32_768,)


def test_states_that_gpus_cannot_share_are_refused() -> None:
    state = State("Mamba", channels=10, conv_steps=3, elements=160)
    model = _model([Attention(4, 128, 128), state])
    with pytest.raises(RuleError, match="does not divide"):
        plan(model, Settings(tensor_parallel=4))


def test_the_steps_lead_to_the_result() -> None:
    found = planned("llama-3.1-8b", gpu_bytes=80 * GIB, gpu_source="--gpu", max_model_len=8192)
    steps = {one.name: one for one in found.steps}
    assert steps["Of a token, all layers"].arithmetic == "32 layers x 4,096"
    assert steps["Of a token, all layers"].result == 131_072
    assert steps["Of a token, all layers"].source == "config.json: num_hidden_layers"
    assert found.pool is not None
    assert steps["Blocks"].result == found.pool.blocks
    assert steps["Sequences of 8,192 tokens at once"].result == found.pool.blocks / 512
    assert all(one.source for one in found.steps)


def _model(layers: list[Attention | State]) -> Model:
    return Model(
        name="made up",
        dtype="bfloat16",
        layers=tuple((layer,) for layer in layers),
        max_model_len=4096,
        parameters=None,
        quantization=None,
        quantized_bytes=None,
        sources={},
    )
