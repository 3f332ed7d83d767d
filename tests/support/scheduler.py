# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, KV cache manager and block pool, driven without a model.

Only the model's answer is made up: one token for each request whose prompt is computed. So a
run is deterministic, takes no accelerator and no weights, and allocates, reuses, frees, evicts
and preempts for real. vLLM is imported inside the functions: it takes a while.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from profilemate.simulation import parts
from profilemate.simulation.parts import (
    TINY_LLAMA,
    VOCABULARY,
    full_attention,
    sliding_window,
    write_model,
)

__all__ = ["TINY_LLAMA", "full_attention", "sliding_window", "write_model"]

TRACE = Path(__file__).parent.parent / "data" / "mooncake_conversation_head.jsonl.gz"
TRACE_BLOCK_TOKENS = 512
ANSWER = 7


def build_scheduler(
    model: Path,
    num_blocks: int,
    *,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_model_len: int = 8192,
    max_num_batched_tokens: int | None = None,
    **arguments: Any,
) -> Any:
    """A Scheduler over a pool of ``num_blocks`` blocks, as ``parts.build_scheduler`` makes it."""
    return parts.build_scheduler(
        model,
        num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens or max_model_len,
        **arguments,
    )


class RequestMaker(parts.RequestMaker):
    """Makes vLLM Requests whose block hashes are those of ``block_size`` tokens."""

    def __init__(self, block_size: int = 16) -> None:
        super().__init__(block_size)


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
    return parts.answer(scheduler, output, lambda request: ANSWER)


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
