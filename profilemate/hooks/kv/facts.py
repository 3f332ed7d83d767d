# SPDX-License-Identifier: Apache-2.0
"""The facts of metadata.json that only an engine's configuration has.

Releases keep them in different places, so each fact is read on its own, and is null where it cannot
be read. Nothing here runs more than once an engine.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from profilemate import __version__
from profilemate.record.redact import public_name


def engine_rank(vllm_config: Any) -> int:
    """The data-parallel rank of the engine; its index where vLLM runs each rank by itself."""
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank if index is None else index)


def describe(scheduler: Any, pools: list[Any]) -> dict[str, Any]:
    """The facts of one engine, ready for its journal's header."""
    config = scheduler.vllm_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    caching = bool(config.cache_config.enable_prefix_caching)
    return {
        "versions": versions(),
        "device": fact(lambda: str(config.device_config.device_type)),
        "pools": [_pool(pool) for pool in pools],
        "groups": [_group(group, scheduler, index, pools) for index, group in enumerate(groups)],
        "caching": caching,
        "hash_block_size": hash_block_size(scheduler, pools),
        "told_by_content": prefix_unit(scheduler, pools),
        "content_ids_shared": hashes_are_shared(config),
        "model": _model(config, groups),
        "cache": _cache(scheduler, config),
        "parallel": _parallel(config),
        "scheduler": _scheduling(scheduler, config),
        "settings": _settings(config),
    }


def is_plain(scheduler: Any) -> bool:
    """Whether there is one group of full attention, so that a request's block table leads to the
    contents of all its full blocks."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ in (
        "FullAttentionSpec",
        "MLAAttentionSpec",
    )


def is_tabled(scheduler: Any, pools: list[Any]) -> bool:
    """Whether the block tables, as the steps' outputs give them, say which blocks a request has.

    They do with one group of full attention in one pool, and without a connector, which hands
    blocks to requests that no step's output names.
    """
    if len(pools) > 1 or not is_plain(scheduler) or getattr(scheduler, "connector", None):
        return False
    managers = fact(lambda: scheduler.kv_cache_manager.coordinator.single_type_managers)
    return (
        bool(managers)
        and type(managers[0]).__name__ == "FullAttentionManager"
        and managers[0].block_size == fact(lambda: pools[0].hash_block_size)
    )


def prefix_unit(scheduler: Any, pools: list[Any]) -> int:
    """Prefixes that end at a multiple of this many tokens have the content id of their last block,
    which is the same for all engines of the session; 0: none have."""
    caching = scheduler.vllm_config.cache_config.enable_prefix_caching
    is_shared = caching and hashes_are_shared(scheduler.vllm_config)
    return hash_block_size(scheduler, pools) if is_shared else 0


def hash_block_size(scheduler: Any, pools: list[Any]) -> int:
    """Tokens that one content id stands for."""
    return int(fact(lambda: pools[0].hash_block_size) or scheduler.block_size)


def has_mamba(scheduler: Any) -> bool:
    """Whether a group keeps Mamba states, whose manager evicts through the pool's inner method."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return any("Mamba" in type(group.kv_cache_spec).__name__ for group in groups)


def versions() -> dict[str, str | None]:
    """The versions of the software that runs here."""
    return {
        "profilemate": __version__,
        "vllm": fact(lambda: sys.modules["vllm"].__version__),
        "torch": fact(lambda: str(sys.modules["torch"].__version__)),
        "python": platform.python_version(),
    }


def _pool(pool: Any) -> dict[str, int | None]:
    null = getattr(pool, "null_block", None)
    # Up to vLLM 0.10.1 the null block counts in a pool's usage. No other has been handed out yet.
    counts_null = bool(fact(getattr(pool, "get_usage", int)))
    return {
        "blocks": int(pool.num_gpu_blocks),
        "null": None if null is None else int(null.block_id),
        "usage_blocks": int(pool.num_gpu_blocks) - (null is not None and not counts_null),
    }


def _group(group: Any, scheduler: Any, index: int, pools: list[Any]) -> dict[str, Any]:
    spec = group.kv_cache_spec
    managers = fact(lambda: scheduler.kv_cache_manager.coordinator.single_type_managers)
    pool = managers[index].block_pool if managers else pools[0]
    size = managers[index].block_size if managers else spec.block_size
    return {
        "kind": type(spec).__name__,
        "block_size": int(size),
        "layers": len(group.layer_names),
        "sliding_window": getattr(_of_one_layer(spec), "sliding_window", None),
        "bytes_per_block": fact(lambda: int(spec.page_size_bytes) * len(group.layer_names)),
        "pool": next((i for i, known in enumerate(pools) if known is pool), 0),
        **_of_kind(group, spec),
    }


def _of_kind(group: Any, spec: Any) -> dict[str, Any]:
    """What a manager of such a group needs beside the block size; null where it has no such."""
    one = _of_one_layer(spec)
    return {
        "layer_kind": type(one).__name__,
        "is_eagle_group": bool(getattr(group, "is_eagle_group", False)),
        "prefix_cacheable": bool(fact(lambda: getattr(spec, "prefix_cacheable", True))),
        **{name: _plain(getattr(one, name, None)) for name in _OF_SPEC},
    }


def _of_one_layer(spec: Any) -> Any:
    """A layer's spec: layers of several sizes have one for each in their group's."""
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


_OF_SPEC = (
    "attention_chunk_size",
    "extra_retained_tokens",
    "mamba_cache_mode",
    "num_speculative_blocks",
    "num_prefill_checkpoint_blocks",
    "prefill_checkpoint_alignment",
)


def _plain(value: Any) -> int | str | None:
    return value if value is None or isinstance(value, str) else int(value)


def hashes_are_shared(config: Any) -> bool:
    """Whether two processes hash the same block alike: from vLLM 0.29 on they do, but by xxhash."""
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return True
    version = fact(lambda: sys.modules["vllm"].__version__) or "0"
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    algorithm = fact(lambda: str(config.cache_config.prefix_caching_hash_algo)) or ""
    return numbers >= [0, 29] and not algorithm.startswith("xxhash")


def _model(config: Any, groups: Any) -> dict[str, Any]:
    model, parallel = config.model_config, config.parallel_config
    per_token = [
        group.kv_cache_spec.page_size_bytes
        * len(group.layer_names)
        / group.kv_cache_spec.block_size
        for group in groups
        if hasattr(group.kv_cache_spec, "page_size_bytes")
    ]
    return {
        "name": fact(lambda: public_name(str(model.served_model_name or model.model))),
        "architecture": fact(lambda: list(model.architectures)),
        "layers": fact(lambda: int(model.get_num_layers(parallel))),
        "kv_heads": fact(lambda: int(model.get_num_kv_heads(parallel))),
        "head_size": fact(lambda: int(model.get_head_size())),
        "dtype": fact(lambda: str(model.dtype).removeprefix("torch.")),
        "bytes_per_token": fact(lambda: round(sum(per_token))),
        "quantization": fact(lambda: model.quantization),
    }


def _cache(scheduler: Any, config: Any) -> dict[str, Any]:
    cache = config.cache_config
    max_len = int(config.model_config.max_model_len)
    groups = scheduler.kv_cache_config.kv_cache_groups
    tokens = getattr(cache, "kv_cache_size_tokens", None)
    if not tokens:
        blocks = int(scheduler.kv_cache_config.num_blocks)
        tokens = blocks * int(scheduler.block_size) // max(1, len(groups))
    concurrency = getattr(cache, "kv_cache_max_concurrency", None) or tokens / max_len
    return {
        "block_size": [int(group.kv_cache_spec.block_size) for group in groups],
        "blocks": int(scheduler.kv_cache_config.num_blocks),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "gpu_memory_utilization": fact(lambda: float(cache.gpu_memory_utilization)),
        "cache_dtype": fact(lambda: str(cache.cache_dtype)),
        # As the platform left it: on some processors that is not what was asked for.
        "mamba_ssm_cache_dtype": fact(lambda: str(cache.mamba_ssm_cache_dtype)),
        "num_gpu_blocks_override": fact(lambda: int(cache.num_gpu_blocks_override)),
        "kv_cache_memory_bytes": fact(lambda: int(cache.kv_cache_memory_bytes)),
        "prefix_cache_retention_interval": fact(lambda: _retention_interval(scheduler)),
        "enable_mamba_shared_prefix_checkpoint": fact(
            lambda: bool(cache.enable_mamba_shared_prefix_checkpoint)
        ),
        "max_model_len": max_len,
        "tokens": int(tokens),
        "max_concurrency": round(float(concurrency), 4),
    }


def _retention_interval(scheduler: Any) -> int | None:
    interval = scheduler.kv_cache_manager.coordinator.retention_interval
    return None if interval is None else int(interval)


def _parallel(config: Any) -> dict[str, Any]:
    parallel = config.parallel_config
    return {
        "tensor": fact(lambda: int(parallel.tensor_parallel_size)),
        "pipeline": fact(lambda: int(parallel.pipeline_parallel_size)),
        "data": fact(lambda: int(parallel.data_parallel_size)),
        "executor": fact(lambda: str(parallel.distributed_executor_backend)),
    }


def _scheduling(scheduler: Any, config: Any) -> dict[str, Any]:
    settings = config.scheduler_config
    return {
        "class": f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        "max_num_seqs": fact(lambda: int(settings.max_num_seqs)),
        "max_num_batched_tokens": fact(lambda: int(settings.max_num_batched_tokens)),
        "chunked_prefill": fact(lambda: bool(settings.enable_chunked_prefill)),
        "async_scheduling": fact(lambda: bool(settings.async_scheduling)),
        "policy": fact(lambda: str(settings.policy)),
        "watermark": fact(lambda: float(settings.watermark)),
        "speculative_tokens": fact(lambda: int(config.num_speculative_tokens)),
        "max_num_scheduled_tokens": fact(lambda: int(scheduler.max_num_scheduled_tokens)),
        "max_num_active_seqs": fact(lambda: int(scheduler.max_num_active_reqs)),
        "scheduler_reserve_full_isl": fact(lambda: bool(settings.scheduler_reserve_full_isl)),
        "long_prefill_token_threshold": fact(lambda: int(settings.long_prefill_token_threshold)),
        "long_prefill_token_threshold_adaptive": fact(
            lambda: bool(settings.long_prefill_token_threshold_adaptive)
        ),
        "max_num_partial_prefills": fact(lambda: int(settings.max_num_partial_prefills)),
        "max_long_partial_prefills": fact(lambda: int(settings.max_long_partial_prefills)),
        "max_loras": fact(lambda: int(config.lora_config.max_loras)),
        "connector": fact(lambda: config.kv_transfer_config.kv_connector),
        "offloading": fact(lambda: _offloading(scheduler, config.kv_transfer_config)),
        "speculative_method": fact(lambda: config.speculative_config.method),
        "drops_hit_unit": fact(lambda: _drops_hit_unit(config.speculative_config)),
        "draft_slots": fact(lambda: int(config.speculative_config.max_num_new_slots_for_drafting)),
        "lookahead_tokens": fact(lambda: int(scheduler.num_lookahead_tokens)),
    }


def _offloading(scheduler: Any, transfer: Any) -> dict[str, Any] | None:
    """How the offloading connector keeps blocks in host memory; None without it."""
    if transfer is None or transfer.kv_connector != "OffloadingConnector":
        return None
    given = transfer.kv_connector_extra_config
    config = scheduler.connector.connector_scheduler.config
    return {
        "spec": fact(lambda: str(given.get("spec_name", "CPUOffloadingSpec"))),
        "host_bytes": fact(lambda: int(given["cpu_bytes_to_use"])),
        "chunk_blocks": fact(lambda: int(config.blocks_per_chunk)),
        "prompts_only": fact(lambda: bool(config.offload_prompt_only)),
        "policy": fact(lambda: str(given.get("eviction_policy", "lru"))),
        "store_threshold": fact(lambda: int(given.get("store_threshold", 0))),
    }


def _drops_hit_unit(speculative: Any) -> bool:
    """Whether the last block of every prefix hit is computed anew, as some drafters need."""
    if speculative is None:
        return False
    rule = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(rule())


_SETTINGS = {
    "cache_config": {
        "block-size": "block_size",
        "kv-cache-dtype": "cache_dtype",
        "enable-prefix-caching": "enable_prefix_caching",
        "gpu-memory-utilization": "gpu_memory_utilization",
        "kv-cache-memory-bytes": "kv_cache_memory_bytes",
        "kv-offloading-size": "kv_offloading_size",
        "num-gpu-blocks-override": "num_gpu_blocks_override",
    },
    "scheduler_config": {
        "enable-chunked-prefill": "enable_chunked_prefill",
        "long-prefill-token-threshold": "long_prefill_token_threshold",
        "max-num-batched-tokens": "max_num_batched_tokens",
        "max-num-seqs": "max_num_seqs",
        "scheduler-reserve-full-isl": "scheduler_reserve_full_isl",
        "watermark": "watermark",
    },
    "model_config": {
        "enforce-eager": "enforce_eager",
        "max-model-len": "max_model_len",
    },
    "compilation_config": {
        "compilation-config": "cudagraph_capture_sizes",
        "cudagraph-capture-sizes": "max_cudagraph_capture_size",
        "max-cudagraph-capture-size": "max_cudagraph_capture_size",
    },
    "lora_config": {"max-loras": "max_loras"},
}
"""By part of the configuration: flags of the command line, and the setting that each of them
sets."""


def _settings(config: Any) -> list[str]:
    """The flags of this release, of those that advice may name."""
    return sorted(
        flag
        for part, settings in _SETTINGS.items()
        for flag, name in settings.items()
        if hasattr(getattr(config, part, None), name)
    )


def fact(read: Callable[[], Any]) -> Any:
    """The result of this function; None where it raises."""
    try:
        return read()
    except Exception:
        return None
