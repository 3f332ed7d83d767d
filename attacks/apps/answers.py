# SPDX-License-Identifier: Apache-2.0
"""What engines answer to random requests: answers.py MODEL ADAPTER FOLDER COUNT SEED KIND...

Half of the requests go to ``LLM.generate`` at once. The others come and go step by step, where
chance decides when; it is the same chance each time. Each kind of engine has a process of its own,
forked once vLLM is imported. Its answers, or its error, go to FOLDER/KIND.json.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": 32,
    "num_gpu_blocks_override": 96,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "seed": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked-prefill": {"max_num_batched_tokens": 48, "enable_chunked_prefill": True},
    "priority": {"scheduling_policy": "priority", "num_gpu_blocks_override": 40},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
    "lora": {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8},
    "structured": {},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "async-scheduling": {"async_scheduling": True},
    "sleep": {"enable_sleep_mode": True},
    "sleep-call": {},
    "embed": {"runner": "pooling", "convert": "embed"},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tokens(chance: random.Random, count: int) -> list[int]:
    # Few kinds of tokens, so that n-grams come again.
    return chance.choices(range(3, 60), k=count)


class Requests:
    """Random requests: prompts with shared beginnings, and every parameter that changes tokens."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.chance = random.Random(seed)
        self.families = [tokens(self.chance, 300) for _ in range(8)]

    def prompt(self) -> list[int]:
        begin = self.chance.choice(self.families)[: self.chance.randrange(300)]
        return begin + tokens(self.chance, self.chance.randrange(1, 120))

    def params(self) -> Any:
        from vllm import PoolingParams, SamplingParams

        if self.kind == "embed":
            return PoolingParams(task="embed")
        chance = self.chance
        given: dict[str, Any] = {
            # No seed of their own: vLLM's runner on CPUs fails on one where a prompt is computed
            # in parts. So all share one generator, and a batch that differs changes all answers.
            "temperature": chance.choice([0.0, 0.7, 1.3]),
            "max_tokens": chance.randrange(1, 40),
            "logprobs": chance.choice([None, 0, 3]),
            "top_p": chance.choice([1.0, 0.9]),
            "top_k": chance.choice([0, 20]),
            "stop_token_ids": chance.sample(range(3, 60), 3),
            "ignore_eos": True,
        }
        if self.kind == "ngram":
            # vLLM's rejection sampler fails on CPUs where a request has a temperature.
            given |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        elif self.kind == "structured":
            given["structured_outputs"] = self.structure()
            given["temperature"] = 0.0
        else:
            given["n"] = chance.choice([1, 1, 1, 2]) if given["temperature"] else 1
            given["repetition_penalty"] = chance.choice([1.0, 1.0, 1.2])
            given["min_tokens"] = chance.choice([0, 0, 1])
            # vLLM's LoRA on CPUs fails where log probabilities of a prompt are asked for.
            often = [None] * 15 + [None if self.kind == "lora" else 1]
            given["prompt_logprobs"] = chance.choice(often)
        return SamplingParams(**given)

    def structure(self) -> Any:
        from vllm.sampling_params import StructuredOutputsParams

        structures: list[dict[str, Any]] = [
            {"json": SCHEMA},
            {"regex": "[a-f]{3,12}"},
            {"choice": ["yes", "no", "perhaps"]},
        ]
        return StructuredOutputsParams(**self.chance.choice(structures))

    def extra(self, adapter: str) -> dict[str, Any]:
        """What a request has besides: its priority, and an adapter."""
        if self.kind == "priority":
            return {"priority": self.chance.randrange(3)}
        if self.kind == "lora" and self.chance.random() < 0.5:
            from vllm.lora.request import LoRARequest

            return {"lora_request": LoRARequest("adapter", 1, adapter)}
        return {}


def plain(output: Any) -> Any:
    """All of an answer that does not depend on time."""
    if hasattr(output.outputs, "embedding"):
        return output.outputs.embedding
    if hasattr(output.outputs, "data"):
        return output.outputs.data.tolist()
    return {
        "cached": output.num_cached_tokens,
        "prompt_logprobs": logprobs(output.prompt_logprobs),
        "answers": [
            {
                "text": one.text,
                "tokens": list(one.token_ids),
                "ended": [one.finish_reason, one.stop_reason],
                "logprobs": [one.cumulative_logprob, logprobs(one.logprobs)],
            }
            for one in output.outputs
        ],
    }


def logprobs(found: Any) -> Any:
    if found is None:
        return None
    return [
        one and sorted((token, entry.logprob, entry.rank) for token, entry in one.items())
        for one in found
    ]


def all_at_once(llm: Any, requests: Requests, adapter: str, numbers: range) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": requests.prompt()} for _ in numbers]
    params = [requests.params() for _ in numbers]
    extras = [requests.extra(adapter) for _ in numbers]
    if requests.kind == "embed":
        outputs = llm.embed(prompts, pooling_params=params, use_tqdm=False)
    else:
        given = {
            name: [extra.get(name) for extra in extras]
            for name in {key for e in extras for key in e}
        }
        outputs = llm.generate(prompts, params, use_tqdm=False, **given)
    return {str(number): plain(one) for number, one in zip(numbers, outputs, strict=True)}


def step_by_step(llm: Any, requests: Requests, adapter: str, numbers: range) -> dict[str, Any]:
    """Requests come between steps, some leave before their end, and the cache is reset."""
    engine, chance = llm.llm_engine, requests.chance
    waiting, living = list(numbers)[::-1], dict[str, None]()
    answers: dict[str, Any] = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(chance.choice([0, 0, 1, 3])):
            if waiting:
                number = waiting.pop()
                name = f"step-{number}"
                living[name] = None
                engine.add_request(
                    name,
                    {"prompt_token_ids": requests.prompt()},
                    requests.params(),
                    **requests.extra(adapter),
                )
        if living and chance.random() < 0.03:
            name = chance.choice(list(living))
            engine.abort_request([name])
            del living[name]
            answers[name] = "aborted"
        if chance.random() < 0.005:
            llm.reset_prefix_cache()
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = plain(output)
                living.pop(output.request_id, None)
    return answers


def run(model: str, adapter: str, kind: str, count: int, seed: int) -> dict[str, Any]:
    """The answers of an engine of this kind."""
    from vllm import LLM

    llm = LLM(model, **{**BASE, **KINDS[kind]})
    if kind == "structured":
        # Made in a thread, grammars are ready at a moment that differs from run to run.
        core = llm.llm_engine.engine_core.engine_core
        core.structured_output_manager._use_async_grammar_compilation = False
    requests, half = Requests(kind, seed), count // 2
    answers = all_at_once(llm, requests, adapter, range(half))
    if kind.startswith("sleep"):
        llm.sleep(level=1)
        llm.wake_up()
    return answers | step_by_step(llm, requests, adapter, range(half, count))


def main() -> None:
    model, adapter, folder, count, seed, *kinds = sys.argv[1:]
    import vllm.v1.engine.llm_engine  # noqa: F401 (before the forks)

    for kind in kinds:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        try:
            wanted = int(count) if kind == kinds[0] else int(count) // 4
            result = run(model, adapter, kind, wanted, int(seed))
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        Path(folder, f"{kind}.json").write_text(json.dumps(result))
        # As an application ends, so that the engine's journal has its end.
        sys.exit()


if __name__ == "__main__":
    main()
