# SPDX-License-Identifier: Apache-2.0
"""Small sound sessions, which attacks then damage."""

from __future__ import annotations

import random
import shutil
from multiprocessing import get_context
from pathlib import Path

from tests.analysis import stories
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import eager, full, piecewise, set_up
from tests.report import generated


def make(folder: Path) -> list[Path]:
    """Sessions of several kinds, each in a folder of its own: by hand, and of a real scheduler."""
    stories.swept(SessionBuilder(folder / "story"))
    _graphs(SessionBuilder(folder / "graphs"))
    generated.write(folder / "generated", 60)
    # It imports vLLM, which takes memory that the attack's processes do not need.
    process = get_context("spawn").Process(target=record, args=(folder / "real", folder / "model"))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("no session could be recorded: see the traceback above")
    return [folder / name for name in ("story", "graphs", "generated", "real")]


def _graphs(session: SessionBuilder) -> None:
    set_up(session)
    stories.swept(session)
    session.rows("cuda_graph_captures.csv", *({**full(size)} for size in (1, 2, 4, 8)))
    session.rows("cuda_graph_captures.csv", {**piecewise(8), "capture_time_sec": 1.5})
    session.rows(
        "cuda_graph_usage.csv",
        *({**full(size), "replay_count": 9, "dummy_count": 2} for size in (1, 2, 4, 8)),
    )
    session.rows(
        "cuda_graph_timeline.csv",
        *({**full(4), "unpadded_tokens": tokens} for tokens in (1, 2, 3, 4)),
        {**eager(40), "unpadded_tokens": 40},
    )
    gibibyte = 2**30
    session.rows(
        "gpu_memory.csv",
        *(
            {"timestamp_sec": at, "used_bytes": at * gibibyte, "free_bytes": (9 - at) * gibibyte}
            for at in range(1, 9)
        ),
    )


def record(target: Path, model: Path) -> None:
    """A session of vLLM's scheduler: shared prompts, evictions, preemptions, aborts."""
    import vllm.v1.core.sched.scheduler as scheduler_module
    from vllm.v1.request import RequestStatus

    from profilemate import collector
    from profilemate.hooks.kv import scheduler as hook
    from profilemate.record import recorder
    from tests.kv.recording import hooks_only
    from tests.support.scheduler import RequestMaker, answer, build_scheduler, tokens, write_model

    base = target.parent / "recording"
    hook.attach(scheduler_module)
    with hooks_only(base):
        draw, make_request = random.Random(0), RequestMaker(16)
        scheduler = build_scheduler(write_model(model), 41, block_size=16, max_num_seqs=8)
        for number in range(60):
            prompt = tokens(draw.randrange(4), 48) + tokens(number, draw.randrange(1, 200))
            scheduler.add_request(make_request(f"r{number}", prompt, draw.randrange(1, 40)))
            if number % 9 == 8:
                scheduler.finish_requests([f"r{number}"], RequestStatus.FINISHED_ABORTED)
            for _ in range(3):
                output = scheduler.schedule()
                scheduler.update_from_output(output, answer(scheduler, output))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, answer(scheduler, output))
        recorder.close_all()
    (session,) = (path for path in base.iterdir() if path.is_dir())
    collector.finalize(session)
    shutil.move(session, target)
