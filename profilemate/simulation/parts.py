# SPDX-License-Identifier: Apache-2.0
"""How to make vLLM's scheduler, its requests and a model's answers, in any release?

Arguments that a release does not know are left out. Comments name the release where it needs
something else. vLLM is imported inside the functions: it takes a while.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

VOCABULARY = 512

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of a tiny Llama, enough for a scheduler."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
    return folder


def known(callee: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this release knows."""
    names = _parameters(callee)
    return {name: value for name, value in arguments.items() if name in names}


@functools.cache
def _parameters(callee: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    # Once: this takes longer than to make a request.
    return inspect.signature(callee).parameters


def build_scheduler(
    model: Path,
    num_blocks: int,
    *,
    block_size: int,
    specs: Sequence[Any] | None = None,
    hash_block_size: int | None = None,
    eagle_groups: Collection[int] = (),
    retention_interval: int | None = None,
    mamba_cache_mode: str | None = None,
    data_parallel_index: int = 0,
    pool_bytes: int = 0,
    change: Callable[[Any], None] = lambda config: None,
    **engine_args: Any,
) -> Any:
    """A Scheduler (or the class that ``engine_args`` choose) over a pool of ``num_blocks`` blocks.

    ``specs`` are the KV cache groups' specs; one group of full attention by default.
    ``eagle_groups`` are the numbers of those with layers of a drafter. ``retention_interval`` and
    ``mamba_cache_mode`` are vLLM's; it would refuse the latter for the model that stands in.
    ``data_parallel_index`` is a rank of a dense model, which else is an engine of its own.
    ``pool_bytes`` is what the pool takes, where a KV connector needs to know.
    ``change`` is given vLLM's configuration before the scheduler gets it.
    ``engine_args`` are vLLM's own arguments, and keep the values that are given here.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    arguments = {
        "model": str(model),
        "load_format": "dummy",
        "block_size": block_size,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        **engine_args,
    }
    config = EngineArgs(**known(EngineArgs, arguments)).create_engine_config()
    # vLLM changes these on CPUs; the scheduler takes any value.
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block_size
    config.cache_config.enable_prefix_caching = arguments["enable_prefix_caching"]
    config.scheduler_config.async_scheduling = arguments["async_scheduling"]
    config.parallel_config.data_parallel_index = data_parallel_index
    change(config)
    if mamba_cache_mode is not None:
        config.cache_config.mamba_cache_mode = mamba_cache_mode
    groups = [
        KVCacheGroupSpec(
            [f"layer.{number}"],
            spec,
            **({"is_eagle_group": True} if number in eagle_groups else {}),
        )
        for number, spec in enumerate(specs or [full_attention(block_size)])
    ]
    cache = {
        "num_blocks": num_blocks,
        "kv_cache_groups": groups,
        "kv_cache_tensors": [_tensor(pool_bytes)] if pool_bytes else [],
        "prefix_cache_retention_interval": retention_interval,
        # Up to 0.8.5.
        "tensors": {},
    }
    chosen = getattr(config.scheduler_config, "get_scheduler_cls", lambda: Scheduler)()
    scheduling = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(**known(KVCacheConfig, cache)),
        "structured_output_manager": _structured_output_manager(config),
        "log_stats": True,
        "block_size": block_size,
        "hash_block_size": hash_block_size or block_size,
    }
    # A subclass may take *args and **kwargs, which do not say what it knows.
    return chosen(**known(Scheduler, scheduling))


def _tensor(size: int) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheTensor

    # Only its size is read.
    arguments = {"size": size, "layers": [], "layer_stride": 0, "block_stride": 0, "shared_by": []}
    return KVCacheTensor(**known(KVCacheTensor, arguments))


def _structured_output_manager(config: Any) -> Any:
    import vllm.v1.structured_output as module

    # 0.9.0 always makes a tokenizer, in a way that transformers no longer supports.
    no_tokenizer = SimpleNamespace(get_lora_tokenizer=lambda lora: None)
    if hasattr(module, "init_tokenizer_from_configs"):
        module.init_tokenizer_from_configs = lambda *_, **__: no_tokenizer
    return module.StructuredOutputManager(config)


def full_attention(block_size: int) -> Any:
    """The spec of a group of full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return _attention(FullAttentionSpec, block_size)


def sliding_window(block_size: int, window: int, **more: Any) -> Any:
    """The spec of a group of sliding-window attention; ``window`` in tokens."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return _attention(SlidingWindowSpec, block_size, sliding_window=window, **more)


def chunked_local(block_size: int, chunk: int) -> Any:
    """The spec of a group whose tokens see their own chunk of the text; ``chunk`` in tokens."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return _attention(ChunkedLocalAttentionSpec, block_size, attention_chunk_size=chunk)


def mamba(block_size: int, **more: Any) -> Any:
    """The spec of a group of Mamba states; ``more`` by vLLM's names, as ``mamba_cache_mode``."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    arguments = {
        "block_size": block_size,
        "shapes": ((4, 4),),
        "dtypes": (torch.float32,),
        **more,
    }
    return MambaSpec(**known(MambaSpec, arguments))


def _attention(spec: Callable[..., Any], block_size: int, **more: Any) -> Any:
    import torch

    arguments = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": torch.bfloat16,
        # Up to 0.10.2.
        "use_mla": False,
        **more,
    }
    return spec(**known(spec, arguments))


class RequestMaker:
    """Makes vLLM's Requests, whose block hashes are those of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self._hasher = _block_hasher(block_size)

    def __call__(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        prompt_logprobs: int | None = None,
        **fields: Any,
    ) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        parameters = _parameters(Request)
        # All else that a release requires may be None.
        arguments: dict[str, Any] = {
            name: None
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
        }
        arguments |= {
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "sampling_params": SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs
            ),
            "eos_token_id": 2,
            "block_hasher": self._hasher,
            "arrival_time": 0.0,
            **fields,
        }
        return Request(**known(Request, arguments))


def _block_hasher(block_size: int) -> Any:
    """The function that hashes a request's blocks. None up to 0.9.2, where the KV cache manager
    hashes them."""
    import vllm.v1.core.kv_cache_utils as utils

    if not hasattr(utils, "get_request_block_hasher"):
        return None
    utils.init_none_hash(hash_function())
    return utils.get_request_block_hasher(block_size, hash_function())


def hash_function() -> Any:
    """The function that vLLM hashes blocks with by default."""
    try:
        # From 0.11.1.
        module = import_module("vllm.utils.hashing")
    except ModuleNotFoundError:
        module = import_module("vllm.utils")
    # Up to 0.10.0 it is found by its own name.
    by_name = getattr(module, "get_hash_fn_by_name", lambda name: getattr(module, name))
    return by_name("sha256")


def answer(scheduler: Any, output: Any, sample: Callable[[Any], int]) -> Any:
    """What a model would return for this step: a token of ``sample`` for each request of which all
    tokens are computed."""
    return answered(
        {
            name: [sample(scheduler.requests[name])] if is_sampled else []
            for name, is_sampled in sampling(scheduler, output).items()
        }
    )


def sampling(scheduler: Any, output: Any) -> dict[str, bool]:
    """For each request of a step that was just scheduled, whether the step computes all of its
    tokens, so that a new one follows."""
    requests = {name: scheduler.requests[name] for name in output.num_scheduled_tokens}
    return {name: each.num_computed_tokens >= each.num_tokens for name, each in requests.items()}


def answered(tokens: Mapping[str, list[int]]) -> Any:
    """What a model would return with these tokens for each request of a step."""
    make, taken, as_arrays = _answers()
    ids, sampled = list(tokens), list[Any](tokens.values())
    if as_arrays:
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
    return make(**{name: value for name, value in arguments.items() if name in taken})


@functools.cache
def _answers() -> tuple[Callable[..., Any], frozenset[str], bool]:
    """The class of answers, the arguments that it takes, and whether it wants tokens in arrays."""
    from vllm.v1.outputs import ModelRunnerOutput

    # 0.11.1 and 0.11.2 do.
    as_arrays = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])
    return ModelRunnerOutput, frozenset(inspect.signature(ModelRunnerOutput).parameters), as_arrays


def prepare_libraries() -> None:
    """Add to newer libraries what older releases of vLLM expect. Call it before vLLM's import."""
    import torch
    from transformers import AutoConfig

    # 0.9.2 registers configurations that transformers itself has by now.
    register = AutoConfig.register
    AutoConfig.register = staticmethod(  # type: ignore[method-assign]
        lambda model_type, config, exist_ok=False: register(model_type, config, exist_ok=True)
    )
    # 0.17.1 asks for these when it is imported, and torch 2.13 has them elsewhere.
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if not hasattr(torch._C._cpu, name):
            setattr(torch._C._cpu, name, lambda: False)
    if find_spec("triton") is None and _replaces_triton():
        # These two look for triton, and must do so before vLLM replaces it.
        import_module("torch._inductor.compile_fx")
        import_module("torch._inductor.lowering")


def _replaces_triton() -> bool:
    """Whether this vLLM, as 0.8.5, replaces a missing triton by a module without a version."""
    found = find_spec("vllm")
    importing = Path(found.origin or "").parent / "triton_utils" / "importing.py" if found else None
    return (
        importing is not None
        and importing.is_file()
        and "sys.modules['triton'] =" in importing.read_text()
    )


def describe_the_model() -> None:
    """Say to vLLM what kind of model a Llama is.

    vLLM would start a process that imports all that a model needs, only to ask its class. That
    takes longer than all the rest, and needs compiled code that may be missing.
    """
    from vllm.model_executor.models import registry

    known_of_it = {
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
    info = registry._ModelInfo(**{name: known_of_it.get(name, False) for name in names})
    registry._run_in_subprocess = lambda ask: info
