# SPDX-License-Identifier: Apache-2.0
"""What vLLM does with a workload, as its engine and its users see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.scheduler import RequestMaker, answer, tokens

MOST_STEPS = 10_000
"""A workload of the tests takes some hundreds. One that takes more does not end."""

Arrival = tuple[int, Any]


def arrivals(count: int = 40) -> list[Arrival]:
    """Step and request: prompts that share 64 tokens, three at a time."""
    make = RequestMaker()
    return [
        (index // 3, make(f"request {index}", tokens(index % 4, 64) + tokens(90 + index, 40), 9))
        for index in range(count)
    ]


def transcript(
    scheduler: Any,
    workload: list[Arrival],
    after_step: Callable[[], object] = lambda: None,
    run_model: Callable[[Any], None] = lambda output: None,
) -> list[Any]:
    """Each step's schedule and results, in plain values.

    ``run_model`` is given each step's output once it has been noted.
    """
    waiting = workload[::-1]
    steps: list[Any] = []
    while waiting or scheduler.has_unfinished_requests():
        while waiting and waiting[-1][0] <= len(steps):
            scheduler.add_request(waiting.pop()[1])
        assert len(steps) < MOST_STEPS
        output = scheduler.schedule()
        step = _scheduled(output)
        run_model(output)
        results = scheduler.update_from_output(output, answer(scheduler, output))
        steps.append([step, _results(results)])
        after_step()
    return steps


def _scheduled(output: Any) -> list[Any]:
    new = [[data.req_id, *map(list, data.block_ids)] for data in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    blocks = [groups and [list(ids) for ids in groups] for groups in cached.new_block_ids]
    return [output.num_scheduled_tokens, new, list(cached.req_ids), blocks]


def _results(results: Any) -> list[Any]:
    return [
        [result.request_id, result.new_token_ids, str(result.finish_reason)]
        for outputs in results.values()
        for result in outputs.outputs
    ]
