# SPDX-License-Identifier: Apache-2.0
"""What counting experts adds to a step of an engine on a CPU: python -m benchmarks.expert_counting

A real engine with a small MoE model answers the same requests again and again, with the experts not
counted, counted, and counted with pairs; the order is drawn anew each time, and the median of the
differences counts. It says what counting costs a CPU, which does all of it in the engine's thread.
On a GPU other things decide, and nothing here is about those.

  python -m benchmarks.expert_counting                            8 layers, 4 of 32 experts a token
  python -m benchmarks.expert_counting --layers 24 --experts 64   another model
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.command import Options, count, progress, run
from benchmarks.pairs import compare, note
from benchmarks.result import BenchmarkError, Result, middle
from profilemate.hooks.gpu import experts
from profilemate.hooks.gpu.graphs import Graphs
from profilemate.record.recorder import Recorder

REQUESTS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=count, default=8, help="of the model (8)")
    parser.add_argument("--experts", type=count, default=32, help="of a layer (32)")
    parser.add_argument("--chosen", type=count, default=4, help="for each token (4)")
    parser.add_argument("--pairs", type=count, default=15, help="of batches in a repeat (15)")
    parser.add_argument("--repeats", type=count, default=3, help="of each comparison (3)")


def measure(options: Options) -> list[Result]:
    """Microseconds that counting adds to a step."""
    environment.need_vllm()
    with tempfile.TemporaryDirectory() as scratch:
        llm, worker = _engine(Path(scratch), options)
        steps = _Steps(llm, worker)
        results = []
        for name, prompt, output in (("decodes", 8, 40), ("prompts", 250, 1)):
            load = partial(steps.run, *_load(prompt, output))
            load(None, Path(scratch))  # What only a first load does is not measured.
            before = steps.count
            load(None, Path(scratch))
            size = steps.count - before
            sides = [
                partial(load, most_pairs, Path(scratch))
                for most_pairs in (None, 0, options.experts)
            ]
            found = [compare(sides, options.pairs, size, seed) for seed in range(options.repeats)]
            progress(f"{name}: {size} steps in a batch")
            for place, what in enumerate(("counted", "counted with pairs")):
                each = [times[place] for times in found]
                results.append(
                    middle(
                        f"experts {what}: {name}",
                        [times.added for times in each],
                        "µs",
                        None,
                        note(each, "a step"),
                    )
                )
        return results


def _load(prompt: int, output: int) -> tuple[list[Any], Any]:
    from vllm import SamplingParams

    draw = random.Random(prompt)
    prompts = [{"prompt_token_ids": draw.choices(range(3, 500), k=prompt)} for _ in range(REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    return prompts, params


def _engine(folder: Path, options: Options) -> tuple[Any, Any]:
    from tests.support.engine import write_moe_model

    model = write_moe_model(folder / "model", options.layers, options.experts, options.chosen)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    from vllm import LLM

    llm = LLM(
        str(model),
        dtype="float32",
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=128,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=512,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    core = llm.llm_engine.engine_core.engine_core
    return llm, core.model_executor.driver_worker.worker


class _Steps:
    """Runs a load of an engine, and counts the steps that serve it."""

    def __init__(self, llm: Any, worker: Any) -> None:
        self.count = 0
        self._llm = llm
        self._worker = worker
        self._answers: dict[int, Any] = {}
        execute = worker.execute_model

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return execute(*args, **kwargs)

        worker.execute_model = counted

    def run(self, prompts: list[Any], params: Any, most_pairs: int | None, folder: Path) -> int:
        """Nanoseconds of the engine's thread for this load. ``most_pairs`` is None: not counted."""
        with self._counting(most_pairs, folder):
            began = time.thread_time_ns()
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            took = time.thread_time_ns() - began
        answers = [output.outputs[0].token_ids for output in outputs]
        if self._answers.setdefault(id(prompts), answers) != answers:
            raise BenchmarkError("the answers are not those without")
        return took

    @contextmanager
    def _counting(self, most_pairs: int | None, folder: Path) -> Iterator[None]:
        if most_pairs is None:
            yield
            return
        journal = folder / "worker0.journal"
        fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        recorder = Recorder(fd, {"producer": "worker", "rank": 0}, "worker 0", path=journal)
        counting = experts.Counted()
        problem = experts.begin(self._worker, Graphs(recorder, None), most_pairs, counting)
        if problem is not None or counting.experts is None:
            raise BenchmarkError(f"nothing is counted: {problem}")
        yield
        counting.close()
        if counting.experts.part.lost or not journal.stat().st_size:
            raise BenchmarkError("the counting has ended")
        recorder.close()


if __name__ == "__main__":
    run(__doc__, add_options, measure)
