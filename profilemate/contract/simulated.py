# SPDX-License-Identifier: Apache-2.0
"""What does vLLM's scheduler find in the cache, when it gets these prompts?

The scheduler and the block pool are vLLM's own; no model runs (docs/whatif.md).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis.errors import SessionError
from profilemate.contract.prompts import Prompt
from profilemate.simulation.processes import Simulations

STEP_SEC = 0.03
"""The time of a step. Only how the prompts lie in time depends on it."""


@dataclass(frozen=True)
class Run:
    """What became of the prompts. Tokens, blocks and requests are counts.

    ``hits``: for each prompt, its tokens that were found in the cache; None for one that needs more
    blocks than the pool has. ``query_tokens``: tokens of all others. ``evictions``: blocks with
    content whose room was needed. ``recomputed_tokens``: computed again because of preemptions.
    ``hit_rate``: the tokens found, of those asked for, from 0 to 1.
    """

    hits: tuple[int | None, ...]
    query_tokens: int
    evictions: int
    preemptions: int
    recomputed_tokens: int
    block_size: int
    blocks: int
    vllm: str

    hit_tokens: int = field(init=False)
    hit_rate: float = field(init=False)

    def __post_init__(self) -> None:
        found = sum(hit for hit in self.hits if hit is not None)
        object.__setattr__(self, "hit_tokens", found)
        object.__setattr__(self, "hit_rate", found / self.query_tokens if self.query_tokens else 0)


def simulate(
    simulations: Simulations,
    prompts: Sequence[Prompt],
    *,
    blocks: int,
    block_size: int,
    output_tokens: int,
    max_num_seqs: int,
    at_once: bool,
) -> Run:
    """Run the prompts through vLLM's scheduler.

    Args:
        simulations: the processes that simulate.
        prompts: what is asked, in this order.
        blocks: the pool's blocks, without the null block.
        block_size: tokens of a block.
        output_tokens: what each answer is long.
        max_num_seqs: as in vLLM.
        at_once: whether all arrive at once; else each comes when the one before has ended.

    Raises:
        SessionError: vLLM is missing, or its scheduler takes no such configuration.

    """
    from analysis.whatif import configuration
    from analysis.whatif.clock import StepTime
    from analysis.whatif.workload import read_workload
    from profilemate.simulation.worker import Done, Task

    apart_ms = 0.0 if at_once else 1e3 * STEP_SEC * (output_tokens + max(map(_length, prompts)))
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "prompts.jsonl")
        trace.write_text("\n".join(_lines(prompts, block_size, output_tokens, apart_ms)) + "\n")
        workload = read_workload(trace)
    chosen = configuration.Choices(
        blocks=configuration.pools(f"{blocks + 1}"),
        block_size=(block_size,),
        max_num_seqs=(max_num_seqs,),
    )
    base, _ = configuration.recorded(workload, chosen)
    (tried,) = configuration.configurations(base, chosen, has_contents=True, is_recorded=False)
    (done,) = simulations.run(Task(workload, StepTime(STEP_SEC)), [tried])
    if not isinstance(done, Done):
        raise SessionError(f"vLLM's scheduler cannot run these prompts: {done.reason}")
    lookups = done.figures.lookups
    served = {
        number: pair for number, pair in lookups.found.items() if number not in lookups.failed
    }
    return Run(
        hits=tuple(
            served[number][1] if number in served else None for number in range(len(prompts))
        ),
        query_tokens=sum(query for query, _ in served.values()),
        evictions=done.figures.evictions,
        preemptions=done.figures.preemptions,
        recomputed_tokens=done.figures.recomputed_tokens,
        block_size=block_size,
        blocks=blocks,
        vllm=done.vllm,
    )


def _length(prompt: Prompt) -> int:
    return len(prompt.tokens)


def _lines(
    prompts: Sequence[Prompt], block_size: int, output_tokens: int, apart_ms: float
) -> list[str]:
    """The prompts as a trace: an id stands for a block's tokens and all before them."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    lines = []
    for number, prompt in enumerate(prompts):
        ids: list[int] = []
        for at in range(0, len(prompt.tokens), block_size):
            before = ids[-1] if ids else -1
            content = before, prompt.tokens[at : at + block_size]
            ids.append(numbers.setdefault(content, len(numbers)))
        row = {
            "timestamp": number * apart_ms,
            "input_length": len(prompt.tokens),
            "output_length": output_tokens,
            "hash_ids": ids,
            "block_size": block_size,
        }
        lines.append(json.dumps(row))
    return lines
