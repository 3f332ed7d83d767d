# SPDX-License-Identifier: Apache-2.0
"""Of which families was the reading of the config.json compared with vLLM's class?"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CHECKED = _words(
    """
    apertus arcee aria_text axk1 bloom chatglm cohere cohere2 cohere2_moe cwm deepseek_v2
    deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
    flex_olmo gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe glm4v_text
    glm_ocr_text gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hyperclovax jais2 jamba laguna llama llama4_text mellum minimax_m2
    ministral3 mistral mixtral muse_glimmer_text nemotron nemotron_h olmo olmo2 olmo3
    olmoe opt paddleocr_vl_text phi phi3 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text
    qwen3 qwen3_moe qwen3_next qwen3_vl_text seed_oss smollm3 stablelm starcoder2
    vaultgemma
    """
)
"""By ``model_type``; docs/plan-models.md has the comparison."""


def doubt(family: str) -> str | None:
    """What to know of a plan of this family, as read without vLLM; None where it was compared."""
    if family in CHECKED:
        return None
    return (
        f"The family {family or 'of this model'} was not compared with vLLM's class: its layers "
        "are taken for what the entries of its config.json say in other families. Where vLLM is "
        "installed, its own class decides."
    )
