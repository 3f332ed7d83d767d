# SPDX-License-Identifier: Apache-2.0
"""How do releases differ for one who makes a scheduler, requests and a model's answers?

Arguments that a release does not know are left out; what else it wants is said at each place,
with the release. vLLM is imported inside the functions: it takes a while.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

ANSWER = 7
BLOCK_SIZE = 16


def known(callee: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that this release knows."""
    names = inspect.signature(callee).parameters
    return {name: value for name, value in arguments.items() if name in names}


def build_scheduler(
    model: Path, blocks: int, *, specs: list[Any] | None = None, **engine_args: Any
) -> Any:
    """A Scheduler over a pool of so many blocks; one group of full attention unless told."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    arguments = {
        "model": str(model),
        "load_format": "dummy",
        "max_model_len": 1024,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 1024,
        "enable_chunked_prefill": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        **engine_args,
    }
    config = EngineArgs(**known(EngineArgs, arguments)).create_engine_config()
    # CPUs have their own ideas of these.
    config.cache_config.num_gpu_blocks = blocks
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.enable_prefix_caching = arguments["enable_prefix_caching"]
    config.scheduler_config.async_scheduling = False
    groups = [
        KVCacheGroupSpec([f"layer.{number}"], spec)
        for number, spec in enumerate(specs or [full_attention()])
    ]
    cache = {
        "num_blocks": blocks,
        "kv_cache_groups": groups,
        "kv_cache_tensors": [],
        # Up to 0.8.5.
        "tensors": {},
    }
    arguments = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(**known(KVCacheConfig, cache)),
        "structured_output_manager": _structured_output_manager(config),
        "log_stats": True,
        "block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
    }
    return Scheduler(**known(Scheduler, arguments))


def _structured_output_manager(config: Any) -> Any:
    import vllm.v1.structured_output as module

    # 0.9.0 makes a tokenizer, whatever it is told, and not as transformers has them by now.
    no_tokenizer = SimpleNamespace(get_lora_tokenizer=lambda lora: None)
    module.init_tokenizer_from_configs = lambda *_, **__: no_tokenizer
    return module.StructuredOutputManager(config)


def full_attention() -> Any:
    """The spec of a group of full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return _attention(FullAttentionSpec)


def sliding_window(window: int) -> Any:
    """The spec of a group of sliding-window attention; ``window`` in tokens."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return _attention(SlidingWindowSpec, sliding_window=window)


def _attention(spec: Callable[..., Any], **more: Any) -> Any:
    import torch

    arguments = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": torch.bfloat16,
        # Up to 0.10.2.
        "use_mla": False,
        **more,
    }
    return spec(**known(spec, arguments))


def prepare_libraries() -> None:
    """Give newer libraries what older releases expect of them; before vLLM is imported."""
    import torch
    from transformers import AutoConfig

    # 0.9.2 registers configurations that transformers has by now.
    register = AutoConfig.register
    AutoConfig.register = staticmethod(  # type: ignore[method-assign]
        lambda model_type, config, exist_ok=False: register(model_type, config, exist_ok=True)
    )
    # 0.17.1 asks for these when it is imported, and torch 2.13 has them elsewhere.
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if not hasattr(torch._C._cpu, name):
            setattr(torch._C._cpu, name, lambda: False)


def tell_of_the_model() -> None:
    """Tell vLLM what kind of model a Llama is.

    It would start a process that imports all that a model needs to ask its class, which takes
    longer than all the rest, and asks for compiled parts that are not there.
    """
    from vllm.model_executor.models import registry

    told = {
        "architecture": "LlamaForCausalLM",
        "is_text_generation_model": True,
        "supports_pp": True,
        "attn_type": "decoder",
        "default_pooling_type": "LAST",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "supported_video_pruning_methods": (),
    }
    names = [field.name for field in fields(registry._ModelInfo)]
    info = registry._ModelInfo(**{name: told.get(name, False) for name in names})
    registry._run_in_subprocess = lambda ask: info


class RequestMaker:
    """Makes vLLM's Requests."""

    def __init__(self) -> None:
        self._hasher = _block_hasher()

    def __call__(self, request_id: str, prompt: list[int], max_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        parameters = inspect.signature(Request).parameters
        # What a release asks for beyond this may be None.
        arguments: dict[str, Any] = {
            name: None
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
        }
        arguments.update(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            eos_token_id=2,
            block_hasher=self._hasher,
            arrival_time=0.0,
        )
        return Request(**known(Request, arguments))


def _block_hasher() -> Any:
    """What hashes a request's blocks; None up to 0.9.2, where the KV cache manager does."""
    import vllm.v1.core.kv_cache_utils as utils

    if not hasattr(utils, "get_request_block_hasher"):
        return None
    try:
        # From 0.11.1.
        hash_function = import_module("vllm.utils.hashing").get_hash_fn_by_name("sha256")
    except ModuleNotFoundError:
        hash_function = import_module("vllm.utils").get_hash_fn_by_name("sha256")
    utils.init_none_hash(hash_function)
    return utils.get_request_block_hasher(BLOCK_SIZE, hash_function)


def answer(scheduler: Any, output: Any) -> Any:
    """What a model would return for this step: one token where all was computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    done = [request.num_computed_tokens >= request.num_tokens for request in requests]
    sampled: list[Any] = [[ANSWER] if computed else [] for computed in done]
    if "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"]):
        # 0.11.1 and 0.11.2.
        sampled = [numpy.array(tokens, dtype=int) for tokens in sampled]
    arguments = {
        "req_ids": ids,
        "req_id_to_index": {request_id: index for index, request_id in enumerate(ids)},
        "sampled_token_ids": sampled,
        # Up to 0.9.2.
        "spec_token_ids": None,
        "logprobs": None,
        "prompt_logprobs_dict": {},
        "pooler_output": [],
    }
    return ModelRunnerOutput(**known(ModelRunnerOutput, arguments))
