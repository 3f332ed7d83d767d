# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, KV cache manager and block pool, driven without a model.

Only the model's answer is made up: one token for each request whose prompt is computed. So a
run is deterministic, takes no accelerator and no weights, and allocates, reuses, frees, evicts
and preempts for real. vLLM is imported inside the functions: it takes a while.
"""

from __future__ import annotations

import gzip
import inspect
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TRACE = Path(__file__).parent.parent / "data" / "mooncake_conversation_head.jsonl.gz"
TRACE_BLOCK_TOKENS = 512
VOCABULARY = 512
ANSWER = 7

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


def write_model(folder: Path) -> Path:
    """A folder with the configuration of a tiny Llama, enough for a scheduler."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


def build_scheduler(
    model: Path,
    num_blocks: int,
    *,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_model_len: int = 8192,
    max_num_batched_tokens: int | None = None,
    specs: list[Any] | None = None,
    hash_block_size: int | None = None,
    data_parallel_index: int = 0,
    **engine_args: Any,
) -> Any:
    """A Scheduler (or what ``engine_args`` make of it) over a pool of ``num_blocks`` blocks.

    ``specs`` are the KV cache groups' specs; one group of full attention by default.
    ``data_parallel_index`` is what vLLM tells the ranks of a dense model, each of which is else
    an engine of its own.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "max_model_len": max_model_len,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "max_num_batched_tokens": max_num_batched_tokens or max_model_len,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
    }
    arguments.update(engine_args)
    config = EngineArgs(**arguments).create_engine_config()
    # Switched off on CPUs, whose engine cannot do it; the scheduler can.
    config.scheduler_config.async_scheduling = arguments["async_scheduling"]
    config.parallel_config.data_parallel_index = data_parallel_index
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block_size
    groups = [
        KVCacheGroupSpec([f"layer.{number}"], spec)
        for number, spec in enumerate(specs or [full_attention(block_size)])
    ]
    chosen = getattr(config.scheduler_config, "get_scheduler_cls", lambda: Scheduler)()
    # A subclass may take *args and **kwargs, which says nothing of what it knows.
    known = _known(
        Scheduler,
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        log_stats=True,
        block_size=block_size,
        hash_block_size=hash_block_size or block_size,
    )
    return chosen(**known)


def full_attention(block_size: int) -> Any:
    """The spec of a group of full attention."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return _call(
        FullAttentionSpec,
        block_size=block_size,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.bfloat16,
        use_mla=False,
    )


def sliding_window(block_size: int, window: int) -> Any:
    """The spec of a group of sliding-window attention; ``window`` in tokens."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return _call(
        SlidingWindowSpec,
        block_size=block_size,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.bfloat16,
        use_mla=False,
        sliding_window=window,
    )


def _call(callee: Callable[..., Any], **arguments: Any) -> Any:
    """Call with those of the arguments that this release of vLLM knows."""
    return callee(**_known(callee, **arguments))


def _known(callee: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this release of vLLM knows."""
    known = inspect.signature(callee).parameters
    return {name: value for name, value in arguments.items() if name in known}


class RequestMaker:
    """Makes vLLM Requests whose block hashes are those of ``block_size`` tokens."""

    def __init__(self, block_size: int = 16) -> None:
        import vllm.v1.core.kv_cache_utils as kv_cache_utils
        from vllm.utils.hashing import get_hash_fn_by_name

        hash_function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_function)

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

        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs
        )
        return _call(
            Request,
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            eos_token_id=2,
            block_hasher=self._hasher,
            arrival_time=0.0,
            **fields,
        )


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def trace_requests(
    make: RequestMaker, limit: int | None = None, block_size: int = 16, max_model_len: int = 8192
) -> Iterator[tuple[float, Any]]:
    """Arrival (ms) and request of the trace's lines.

    One trace block becomes one block of vLLM's, so prefix sharing stays exactly as it was while
    lengths shrink by 512 / block_size.
    """
    shrink = TRACE_BLOCK_TOKENS // block_size
    with gzip.open(TRACE, "rt") as lines:
        for index, line in enumerate(lines):
            if limit is not None and index >= limit:
                return
            row = json.loads(line)
            prompt = [token for block in row["hash_ids"] for token in _block(block, block_size)]
            prompt = prompt[: max(1, row["input_length"] // shrink)]
            output = max(1, row["output_length"] // shrink)
            if len(prompt) + output < max_model_len:
                yield row["timestamp"], make(f"request-{index}", prompt, output)


def _block(hash_id: int, block_size: int) -> list[int]:
    """Tokens of a trace block: its number in four of them, so that no two are alike."""
    digits = [3 + (hash_id >> 8 * digit) % 256 for digit in range(4)]
    return digits + [3 + (hash_id * 31 + at) % 500 for at in range(4, block_size)]


def answer(scheduler: Any, output: Any) -> Any:
    """What a model would return for this step."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    done = [request.num_computed_tokens >= request.num_tokens for request in requests]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[ANSWER] if computed else [] for computed in done],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def step(scheduler: Any) -> Any:
    """Run one step; returns the scheduler's output."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(scheduler, output))
    return output


def drive(
    scheduler: Any,
    arrivals: Iterable[tuple[float, Any]],
    *,
    step_ms: float = 30.0,
    after_step: Callable[[], None] = lambda: None,
) -> int:
    """Run to the end on a simulated clock; returns the number of steps."""
    pending = list(arrivals)[::-1]
    clock_ms, steps = 0.0, 0
    while pending or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests() and pending:
            clock_ms = max(clock_ms, pending[-1][0])
        while pending and pending[-1][0] <= clock_ms:
            scheduler.add_request(pending.pop()[1])
        step(scheduler)
        after_step()
        steps += 1
        clock_ms += step_ms
    return steps
