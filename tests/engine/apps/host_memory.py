# SPDX-License-Identifier: Apache-2.0
"""An application whose engine keeps blocks in host memory, by vLLM's offloading connector.

    python host_memory.py MODEL RESULT

vLLM copies blocks of GPUs only, so here a worker of the application's copies those of a CPU engine.
All else is vLLM's: both halves of the connector, what it keeps and finds, and its counters.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

BLOCKS, BLOCK_SIZE = 40, 32


class Copier(OffloadingWorker):
    """Copies at once, and says so when it is asked for the second time."""

    def __init__(self, caches: Any, chunks: int, per_chunk: int) -> None:
        self._per_chunk = per_chunk
        self._pool = [each.tensor for each in caches.tensors]
        self._host = [
            torch.zeros((chunks * per_chunk, tensor.shape[1]), dtype=torch.int8)
            for tensor in self._pool
        ]
        self._done: list[TransferResult] = []
        self._old: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        kept = self._rows(dst_spec.block_ids, src_spec)
        for pool, host in zip(self._pool, self._host, strict=True):
            host[kept] = pool[torch.from_numpy(src_spec.block_ids).long()]
        return self._did(job_id, kept)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        kept = self._rows(src_spec.block_ids, dst_spec)
        for pool, host in zip(self._pool, self._host, strict=True):
            pool[torch.from_numpy(dst_spec.block_ids).long()] = host[kept]
        return self._did(job_id, kept)

    def _rows(self, chunks: Sequence[int], blocks: Any) -> torch.Tensor:
        """Where the blocks are kept; the first of them may lie within a chunk."""
        begin, per = blocks.block_indices[0] % self._per_chunk, self._per_chunk
        rows = [int(chunk) * per + at for chunk in chunks for at in range(per)]
        return torch.tensor(rows[begin : begin + len(blocks.block_ids)])

    def _did(self, job: int, rows: torch.Tensor) -> bool:
        size = len(rows) * sum(tensor.shape[1] for tensor in self._pool)
        self._done.append(TransferResult(job, True, size, 0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        told, self._old, self._done = self._old, self._done, []
        return told

    def wait(self, job_ids: set[int]) -> None:
        pass


class OnCpus(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return Copier(kv_caches, self.num_chunks, self.blocks_per_chunk)


def rounds() -> list[list[list[int]]]:
    """Prompts of more blocks than the pool has, and the same again: some as they were, some longer,
    and one that ends where a block does."""
    generator = random.Random(0)
    first = [generator.choices(range(3, 500), k=length) for length in (320, 417, 350, 256, 500)]
    more = [generator.choices(range(3, 500), k=50) for _ in first]
    longer = [a + b if at % 2 else a for at, (a, b) in enumerate(zip(first, more, strict=True))]
    return [first, longer, first[::-1]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("result", type=Path)
    parser.add_argument("--host", type=int, help="Chunks of two blocks in host memory.")
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {}
    if options.host:
        more["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "OnCpus",
                "spec_module_path": "tests.engine.apps.host_memory",
                "cpu_bytes_to_use": options.host << 20,
                "blocks_per_chunk": 2,
            },
        }
    llm = LLM(
        options.model,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        **more,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    answers = []
    for prompts in rounds():
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
    counters = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    options.result.write_text(json.dumps({"answers": answers, "counters": counters}))


if __name__ == "__main__":
    main()
