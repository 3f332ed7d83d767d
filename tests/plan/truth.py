# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself makes of the models in ``configs/``, written as JSON.

vLLM's own model classes are built on the meta device, which takes no memory; each layer of them
says what it keeps (``get_kv_cache_spec``), and vLLM's ``get_kv_cache_configs`` makes the pool.
Nothing depends on the processor here: vLLM's checks of it answer as on the platform of the case.
For a GPU the layers have CUDA's FlashAttention, and the platform changes what CUDA's changes. The
group of GPUs seems larger than the one process here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

CONFIGS = Path(__file__).parent / "configs"
MEMORY = 60 * 2**30
"""Bytes for the KV cache of each GPU."""


@dataclass(frozen=True)
class Case:
    """A model of ``configs/``, the platform that serves it, and the settings. ``state_dtype``: the
    type of its states that its configuration states, None where it states none."""

    model: str
    platform: str = "gpu"
    tensor: int = 1
    pipeline: int = 1
    cache_dtype: str = "auto"
    state_dtype: str | None = None
    block_size: int | None = None
    caching: bool = True
    hybrid: bool = True

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in asdict(self).items()
            if value != Case.__dataclass_fields__[name].default
        ]
        return ",".join([self.model, *changed[1:]])


CASES = (
    Case("gpt2"),
    Case("opt-125m"),
    Case("llama-3.1-8b"),
    Case("llama-3.1-8b", tensor=2, block_size=32),
    Case("llama-3.1-8b", cache_dtype="fp8"),
    Case("llama-3.1-70b", tensor=8),
    Case("llama-3.1-70b", tensor=2, pipeline=3),
    Case("mistral-7b-v0.1"),
    Case("gemma-2-9b"),
    Case("gemma-2-9b", hybrid=False),
    Case("gemma-3-1b"),
    Case("gemma-3-1b", tensor=2, pipeline=2),
    Case("qwen2.5-7b"),
    Case("qwen3-8b", tensor=16),
    Case("phi-3-mini-4k"),
    Case("mixtral-8x7b", tensor=2),
    Case("gpt-oss-20b", tensor=2),
    Case("deepseek-v3", tensor=8, block_size=16),
    Case("falcon-7b"),
    Case("starcoder-15b"),
    Case("chatglm3-6b"),
    Case("command-r7b"),
    Case("minimax-m2", tensor=8),
    Case("jamba-v0.1"),
    Case("nemotron-h-8b"),
    Case("nemotron-h-8b", tensor=2, cache_dtype="fp8"),
    Case("nemotron-h-8b", state_dtype="bfloat16"),
    Case("granite-4.0-h-tiny"),
    Case("falcon-h1-0.5b", tensor=2),
    Case("qwen3-next-80b-a3b", tensor=4),
    Case("qwen3-next-80b-a3b", caching=False),
    Case("llama-3.1-8b", "cpu-basic"),
    Case("llama-3.1-8b", "cpu-amx", tensor=2, block_size=32),
    Case("gemma-3-1b", "cpu-basic", tensor=2, pipeline=2),
    Case("deepseek-v3", "cpu-basic"),
    Case("deepseek-v3", "cpu-basic", block_size=64),
    Case("deepseek-v3", "cpu-amx"),
    *(
        case
        for platform in ("cpu-basic", "cpu-avx512-bf16")
        for case in (
            Case("jamba-v0.1", platform),
            Case("jamba-v0.1", platform, block_size=16),
            Case("nemotron-h-8b", platform, cache_dtype="fp8"),
            Case("nemotron-h-8b", platform, state_dtype="bfloat16"),
            Case("granite-4.0-h-tiny", platform),
            Case("falcon-h1-0.5b", platform, tensor=2),
            Case("qwen3-next-80b-a3b", platform, tensor=4),
            Case("qwen3-next-80b-a3b", platform, caching=False),
        )
    ),
)
_STATE_DTYPE = "mamba_ssm_cache_dtype"
AVX512_BF16 = ("cpu-avx512-bf16", "cpu-amx")
"""Platforms whose processor has it."""


def main(out: Path) -> None:
    """Write what vLLM makes of each case, and its checks of the processor here."""
    import torch

    checks = (torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported())
    found: dict[str, Any] = {"here": checks}
    _begin()
    for case in CASES:
        with _on(case.platform):
            found[str(case)] = _measure(case)
        found[str(case)]["layout"] = _asked(case)
    out.write_text(json.dumps(found))


def _begin() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.model_loader import utils

    # Of all groups of processes, that of experts is only made for such a model.
    with set_current_vllm_config(_config(Case("mixtral-8x7b"))):
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        init_distributed_environment(1, 0, meeting, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    # Only for loading weights once more, and a third of the time that building a model takes.
    utils.record_metadata_for_reloading = lambda model: None


@contextmanager
def _on(platform: str) -> Iterator[None]:
    """vLLM's answers on this platform, whatever the processor here."""
    import torch
    from vllm.config import vllm as vllm_config
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform
    from vllm.v1.attention import selector

    here = type(current_platform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: platform in AVX512_BF16)
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: platform == "cpu-amx")
        if platform == "gpu":
            # Of what is asked here CUDA's platform leaves all to the base class.
            for name in ("check_and_update_config", "update_block_size_for_backend"):
                patch.setattr(here, name, classmethod(getattr(Platform, name).__func__))
            patch.setattr(vllm_config, "HAS_TRITON", True)
        # The backend that another processor got.
        selector._cached_get_attn_backend.cache_clear()
        yield


def entries_of(case: Case) -> dict[str, Any]:
    """The entries of the model's config.json."""
    entries: dict[str, Any] = json.loads((CONFIGS / f"{case.model}.json").read_text())
    return entries if case.state_dtype is None else entries | {_STATE_DTYPE: case.state_dtype}


def _config(case: Case) -> Any:
    """vLLM's configuration for the case, as its command line makes it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.usage.usage_lib import UsageContext

    entries = entries_of(case)
    # Kernels for quantized weights are not there for every CPU; the cache does not depend on it.
    entries.pop("quantization_config", None)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(entries))
    (name,) = entries["architectures"]
    known = ModelRegistry.models[name]
    if hasattr(known, "load_model_cls"):
        # Else vLLM looks at the class in a process of its own, for half a minute.
        ModelRegistry.register_model(name, known.load_model_cls())
    return EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=case.block_size,
        tensor_parallel_size=case.tensor,
        pipeline_parallel_size=case.pipeline,
        kv_cache_dtype=case.cache_dtype,
        enable_prefix_caching=case.caching,
        disable_hybrid_kv_cache_manager=not case.hybrid,
    ).create_engine_config(
        # How many tokens a step of a server takes depends on the memory of the GPU here.
        None if case.platform == "gpu" else UsageContext.OPENAI_API_SERVER
    )


@contextmanager
def _as_gpu(case: Case, stage: int) -> Iterator[None]:
    """As the first GPU of this stage, which is all that sizes depend on."""
    from vllm.distributed import parallel_state

    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    kept = [vars(tensor).copy(), vars(pipeline).copy()]
    tensor.world_size = case.tensor
    pipeline.world_size, pipeline.rank_in_group = case.pipeline, stage
    pipeline.rank, pipeline.ranks = stage, list(range(case.pipeline))
    try:
        yield
    finally:
        vars(tensor).update(kept[0])
        vars(pipeline).update(kept[1])


def _built(case: Case, stage: int) -> tuple[Any, dict[str, Any], int]:
    """The configuration, what each layer keeps, and the bytes of the weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = _config(case)
    with _as_gpu(case, stage), set_current_vllm_config(config):
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        if case.platform == "gpu":
            for layer in config.compilation_config.static_forward_context.values():
                backend = getattr(layer, "attn_backend", None)
                if backend is not None and not backend.is_mla():
                    layer.attn_backend = FlashAttentionBackend
        current_platform.update_block_size_for_backend(config)
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
        return config, get_kv_cache_spec(config), weights


def _measure(case: Case) -> dict[str, Any]:
    from vllm.v1.core import kv_cache_utils

    built = [_built(case, stage) for stage in range(case.pipeline)]
    config = built[0][0]
    # The order that FlashAttention and the CPU's kernels ask for.
    config.cache_config.kv_cache_layout = "LBNHC" if case.platform == "gpu" else "LBHNC"
    made = kv_cache_utils.get_kv_cache_configs(
        config, [specs for _, specs, _ in built], [MEMORY] * case.pipeline
    )
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, made[0])
    groups = [
        {
            "kind": type(each[0].kv_cache_spec).__name__,
            "layers": sum(len(one.layer_names) for one in each),
            "block_size": each[0].kv_cache_spec.block_size,
            "page_bytes": each[0].kv_cache_spec.page_size_bytes,
        }
        for each in zip(*(one.kv_cache_groups for one in made), strict=True)
    ]
    recorded = None
    if case.platform != "gpu" and config.model_config.is_hybrid:
        recorded = _recorded(config, made[0], tokens, concurrency)
    return {
        "recorded": recorded,
        "blocks": made[0].num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "groups": groups,
        "weights": [weights for _, _, weights in built],
        "max_model_len": config.model_config.max_model_len,
        "in_flight_tokens": config.max_in_flight_tokens,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def _recorded(config: Any, cache: Any, tokens: int, concurrency: float) -> dict[str, Any]:
    """What the hooks record of an engine that serves it."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    from profilemate.hooks.kv import facts

    settings = config.cache_config
    settings.num_gpu_blocks = cache.num_blocks
    settings.kv_cache_size_tokens, settings.kv_cache_max_concurrency = tokens, concurrency
    sizes = resolve_kv_cache_block_sizes(cache, config)
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), *sizes)
    return facts.describe(scheduler, [scheduler.kv_cache_manager.block_pool])


def _asked(case: Case) -> dict[str, Any]:
    """What ``profilemate.simulation.groups`` lets vLLM make of our own reading of the model."""
    from analysis.plan import capacity
    from profilemate.simulation import groups
    from tests.plan.planned import model_of, settings_of

    return asdict(capacity.lay_out(model_of(case), settings_of(case), groups.group))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
