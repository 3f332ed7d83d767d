# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself makes of the models in ``configs/``, written as JSON.

vLLM's own model classes are built on the meta device, which takes no memory; each layer of them
says what it keeps (``get_kv_cache_spec``), and vLLM's ``get_kv_cache_configs`` makes the pool.
The layers are told CUDA's FlashAttention where this machine gives them the CPU's kernels, whose
blocks differ, and that the group of GPUs is larger than the one process here.
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

CONFIGS = Path(__file__).parent / "configs"
MEMORY = 60 * 2**30
"""Bytes for the KV cache of each GPU."""


@dataclass(frozen=True)
class Case:
    """A model of ``configs/`` and the settings that it is served with."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    cache_dtype: str = "auto"
    block_size: int = 16
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
    Case("deepseek-v3", tensor=8),
    Case("jamba-v0.1"),
    Case("nemotron-h-8b"),
    Case("nemotron-h-8b", tensor=2, cache_dtype="fp8"),
    Case("granite-4.0-h-tiny"),
    Case("falcon-h1-0.5b", tensor=2),
    Case("qwen3-next-80b-a3b", tensor=4),
    Case("qwen3-next-80b-a3b", caching=False),
)


def main(out: Path) -> None:
    """Write what vLLM makes of each case."""
    found = {}
    _begin()
    for case in CASES:
        found[str(case)] = _measure(case)
        found[str(case)]["layout"] = _asked(case)
    out.write_text(json.dumps(found))


def _begin() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    # Of all groups of processes, that of experts is only made for such a model.
    with set_current_vllm_config(_config(Case("mixtral-8x7b"))):
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        init_distributed_environment(1, 0, meeting, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def _config(case: Case) -> Any:
    """vLLM's configuration for the case, as its command line makes it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    entries = json.loads((CONFIGS / f"{case.model}.json").read_text())
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
    ).create_engine_config()


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
        for layer in config.compilation_config.static_forward_context.values():
            backend = getattr(layer, "attn_backend", None)
            if backend is not None and not backend.is_mla():
                layer.attn_backend = FlashAttentionBackend
        if config.model_config.is_hybrid:
            current_platform._align_hybrid_block_size(config, FlashAttentionBackend)
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
        return config, get_kv_cache_spec(config), weights


def _measure(case: Case) -> dict[str, Any]:
    from vllm.v1.core import kv_cache_utils

    built = [_built(case, stage) for stage in range(case.pipeline)]
    config = built[0][0]
    config.cache_config.kv_cache_layout = "LBNHC"
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
    return {
        "blocks": made[0].num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "groups": groups,
        "weights": [weights for _, _, weights in built],
        "max_model_len": config.model_config.max_model_len,
        "in_flight_tokens": config.max_in_flight_tokens,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def _asked(case: Case) -> dict[str, Any]:
    """What ``profilemate.simulation.groups`` lets vLLM make of our own reading of the model."""
    from analysis.plan import capacity
    from profilemate.simulation import groups
    from tests.plan.planned import model_of, settings_of

    return asdict(capacity.lay_out(model_of(case), settings_of(case), groups.group))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
