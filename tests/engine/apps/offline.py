# SPDX-License-Identifier: Apache-2.0
"""A user's application: an offline ``LLM`` that knows nothing of profilemate.

    python offline.py MODEL RESULT [OPTIONS]

Writes the token ids and finish reasons of two rounds to RESULT, as JSON, and ends with status 3.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

STATUS = 3
VOCABULARY = 512


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def identical_prompts() -> tuple[list[Any], list[Any]]:
    """Eight times the same 1,024 tokens, and eight tokens out."""
    from vllm import SamplingParams

    return [{"prompt_token_ids": tokens(0, 1024)}] * 8, [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=8, detokenize=False)
        for seed in range(8)
    ]


def mixed_prompts() -> tuple[list[Any], list[Any]]:
    """More than the pool holds: eight prompts of 15 blocks that all grow by two, preempting one
    another, then others with shared beginnings that overwrite what is cached. Some stop early.
    """
    from vllm import SamplingParams

    prompts = [tokens(100 + number, 480) for number in range(8)]
    prompts += [tokens(200 + number % 4, 128) + tokens(number, 70) for number in range(16)]
    return [{"prompt_token_ids": prompt} for prompt in prompts], [
        SamplingParams(
            temperature=0.0,
            max_tokens=80,
            detokenize=False,
            stop_token_ids=list(range(3, 23)) if number % 4 == 3 else [],
            ignore_eos=True,
        )
        for number in range(len(prompts))
    ]


def generate(llm: Any, prompts: list[Any], params: list[Any]) -> list[list[Any]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [list(answer.token_ids), answer.finish_reason]
        for output in outputs
        for answer in output.outputs
    ]


def generate_endlessly(llm: Any, slow_while: Path) -> None:
    """Two slow requests, again and again, until somebody ends the engine."""
    from vllm import SamplingParams

    slow = {"slow_while": str(slow_while)}
    params = SamplingParams(max_tokens=1900, ignore_eos=True, detokenize=False, extra_args=slow)
    for seed in range(1000, sys.maxsize, 2):
        prompts = [{"prompt_token_ids": tokens(seed + number, 64)} for number in range(2)]
        llm.generate(prompts, params, use_tqdm=False)


def fork_workers() -> None:
    """vLLM forks its engine on GPUs; its CPU platform asks for spawn, so this asks again."""
    from vllm.utils import system_utils

    def fork() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    system_utils._maybe_force_spawn = fork


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("result", type=Path)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--log-steps")
    parser.add_argument("--endless", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    options = parser.parse_args()

    from vllm import LLM

    counts = None
    if options.count:
        from counting import count

        counts = count()
    if options.log_steps:
        from counting import log_steps

        log_steps(options.log_steps)
    if options.fork:
        fork_workers()
    llm = LLM(
        options.model,
        dtype="float32",
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=2048,
        block_size=32,
        num_gpu_blocks_override=128,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        enable_prefix_caching=True,
        logits_processors=["slow:Slow"],
    )
    identical = generate(llm, *identical_prompts())
    mixed = generate(llm, *mixed_prompts())
    llm.reset_prefix_cache()
    result = {
        "identical": identical,
        "mixed": mixed,
        "counts": counts.result() if counts else None,
    }
    scratch = options.result.with_suffix(".part")
    scratch.write_text(json.dumps(result))
    scratch.rename(options.result)
    if options.endless:
        generate_endlessly(llm, options.result)
    return STATUS


if __name__ == "__main__":
    sys.exit(main())
