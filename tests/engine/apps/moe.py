# SPDX-License-Identifier: Apache-2.0
"""An application with a mixture-of-experts model, which counts for itself what its experts get.

    python moe.py MODEL RESULT [--without-experts]

The count is made from the numbers that each layer's gate gives, in numpy, beside vLLM's router.
"""

import argparse
import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np


class Count:
    """Counts the experts and the pairs of each layer, from the outputs of its gate."""

    def __init__(self, model: Any, experts: int, chosen: int) -> None:
        self.active = True
        self.tokens: list[int] = []
        self.experts: list[list[int]] = []
        self.pairs: list[dict[str, int]] = []
        self.batches: list[int] = []
        for layer, block in enumerate(model.model.layers):
            self.tokens.append(0)
            self.experts.append([0] * experts)
            self.pairs.append({})
            block.block_sparse_moe.gate.register_forward_hook(self._take(layer, chosen))

    def _take(self, layer: int, chosen: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            if not self.active:
                return
            logits = output[0].float().numpy()
            self.tokens[layer] += len(logits)
            if not layer:
                self.batches.append(len(logits))
            for row in np.argsort(-logits, axis=1)[:, :chosen]:
                experts = sorted(map(int, row))
                for expert in experts:
                    self.experts[layer][expert] += 1
                for pair in combinations(experts, 2):
                    key = "-".join(map(str, pair))
                    self.pairs[layer][key] = self.pairs[layer].get(key, 0) + 1

        return hook


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("result", type=Path)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(
        options.model,
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enforce_eager=True,
    )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    config = json.loads(Path(options.model, "config.json").read_text())
    count = Count(runner.get_model(), config["num_local_experts"], config["num_experts_per_tok"])
    generator = random.Random(0)
    prompts = [
        {"prompt_token_ids": generator.choices(range(3, 500), k=length)}
        for length in (5, 40, 300, 17, 64, 200, 9, 128, 33, 70)
    ]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = []
    for half in (prompts[:5], prompts[5:]):
        outputs = llm.generate(half, params, use_tqdm=False)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
        # What an idle data-parallel rank runs. It serves nobody.
        count.active = False
        runner._dummy_run(16)
        count.active = True
    result = {
        "answers": answers,
        "tokens": count.tokens,
        "experts": count.experts,
        "pairs": count.pairs,
        "batches": count.batches,
    }
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
