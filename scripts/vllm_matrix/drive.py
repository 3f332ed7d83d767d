# SPDX-License-Identifier: Apache-2.0
"""Drive the schedulers of the vLLM that is first on the path, and note what they did.

    python -m scripts.vllm_matrix.drive FOLDER [--pausing] CASE...

With --pausing the recording of each case pauses for some steps, and what is counted is what comes
after them.

This runs in a process of its own for each release, with profilemate attached as its users do it.
The sessions of each case go to FOLDER/CASE, beside counts.json with what was counted by
other means. What ended a case is in error.txt there. What the release does, by fact, goes to
FOLDER/facts.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import deque
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from profilemate.hooks.gpu.step_tokens import Prefills
from profilemate.record import recorder
from profilemate.simulation import parts
from scripts.vllm_matrix import adapt, facts
from scripts.vllm_matrix.cases import CASES, Case
from scripts.vllm_matrix.counters import Watch
from tests.support.scheduler import trace_requests, write_model

SHORT_TOKENS = 400
"""The trace's requests that are longer than this, prompt and answer, are left out."""
PAUSED = range(20, 40)
"""Steps of which nothing is recorded, where it pauses."""
MAX_STEPS = 20_000
"""More than any case takes."""


@dataclass
class Run:
    """What was seen of a case from outside the scheduler.

    ``steps`` has scheduled tokens and scheduled requests of each step that scheduled any, and
    ``prefills`` the tokens of prompts among them, as a worker tells them from what it is given.
    ``hits`` has by request the tokens that its first admission did not have to compute, and
    ``outputs`` those of its answer. ``loaded`` has those that its connector loaded. ``prompts``
    stand by request for what its prompt's full blocks hold, each with all that comes before it.
    """

    steps: list[tuple[int, int]] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, list[str]] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    folder, pausing = Path(arguments[0]), "--pausing" in arguments
    cases = [each for each in arguments[1:] if each != "--pausing"]
    model = write_model(folder / "model")
    parts.prepare_libraries()
    # Every hook's module, so that it shows where one no longer fits.
    for module in ("v1.core.sched.scheduler", "v1.engine.core", "v1.worker.worker_base"):
        import_module(f"vllm.{module}")
    parts.describe_the_model()
    watch = Watch()
    with watch.watching():
        for name in cases:
            place = folder / name
            place.mkdir()
            os.environ["VLLM_PROFILING_DIR"] = str(place)
            try:
                seen = json.dumps(_drive(CASES[name], model, watch, pausing=pausing))
            except Exception:
                (place / "error.txt").write_text(traceback.format_exc())
            else:
                (place / "counts.json").write_text(seen)
    os.environ["VLLM_PROFILING"] = "0"
    (folder / "facts.json").write_text(json.dumps(facts.observe(model)))
    return 0


def _drive(case: Case, model: Path, watch: Watch, *, pausing: bool) -> dict[str, Any] | None:
    """What was counted; None where the release has nothing of the kind."""
    if not case.exists():
        return None
    scheduler = case.build(model)
    watch.begin(_pools(scheduler.kv_cache_manager))
    run = Run()
    arrivals = trace_requests(parts.RequestMaker(adapt.BLOCK_SIZE), max_model_len=SHORT_TOKENS)
    pending = [request for _, request in islice(arrivals, case.requests)]
    run.hits = {request.request_id: 0 for request in pending}
    run.prompts = {request.request_id: _prefixes(request.prompt_token_ids) for request in pending}
    for request in pending:
        scheduler.add_request(request)
    _run(case, scheduler, run, watch, pausing=pausing)
    case.at_end(scheduler)
    watch.look()
    run.outputs = {request.request_id: request.num_output_tokens for request in pending}
    run.loaded = getattr(scheduler.connector, "loaded", {})
    return asdict(run) | {
        "block_size": adapt.BLOCK_SIZE if case.plain else None,
        "reused_by": watch.reused_by,
        "pools": [asdict(counts) for counts in watch.counts],
        "pausing": pausing,
    }


def _pools(manager: Any) -> list[Any]:
    """The manager's pool, and those that groups have of their own."""
    groups = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    pools = [manager.block_pool, *(group.block_pool for group in groups)]
    return list({id(pool): pool for pool in pools}.values())


def _run(case: Case, scheduler: Any, run: Run, watch: Watch, *, pausing: bool) -> None:
    """Step until nothing is left: no request, no blocks of one, and no results to come."""
    recording = recorder._living()[-1]
    # Steps are quicker than its looks at what the user asks for.
    recording._asked = None
    # A model runner knows how long its requests are.
    prefills = Prefills(lambda request_id: int(scheduler.requests[request_id].num_tokens))
    in_flight: deque[tuple[Any, Any]] = deque()
    step = 0
    while scheduler.requests or in_flight:
        assert step < MAX_STEPS, f"not done in {step} steps"
        step += 1
        if pausing:
            recording.wants_pause = step in PAUSED
        if scheduler.requests:
            output = _schedule(scheduler, run, prefills)
            if pausing and step == PAUSED.stop:
                watch.begin(_pools(scheduler.kv_cache_manager))
                run.steps, run.prefills, run.preempted = [], [], []
            in_flight.append((output, adapt.answer(scheduler, output)))
            watch.look()
            case.in_step(scheduler, step)
        if len(in_flight) > case.lag or not scheduler.requests:
            scheduler.update_from_output(*in_flight.popleft())
            watch.look()
            case.after_step(scheduler, step)
            watch.look()


def _prefixes(tokens: list[int]) -> list[str]:
    """A digest of the tokens up to the end of each full block."""
    ends = range(adapt.BLOCK_SIZE, len(tokens) + 1, adapt.BLOCK_SIZE)
    return [blake2b(repr(tokens[:end]).encode(), digest_size=8).hexdigest() for end in ends]


def _schedule(scheduler: Any, run: Run, prefills: Prefills) -> Any:
    running = list(scheduler.running)
    output = scheduler.schedule()
    tokens = output.total_num_scheduled_tokens
    of_prompts = prefills.of(output).prefill_tokens
    if tokens:
        run.prefills.append(of_prompts)
        run.steps.append((tokens, len(output.num_scheduled_tokens)))
    for request in running:
        if request.status.name == "PREEMPTED":
            run.preempted.append(request.request_id)
    for data in output.scheduled_new_reqs:
        run.hits[data.req_id] = data.num_computed_tokens
    return output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
