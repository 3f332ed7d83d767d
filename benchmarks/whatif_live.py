# SPDX-License-Identifier: Apache-2.0
"""How true is ``profilemate whatif`` of a live engine? python -m benchmarks.whatif_live

Runs ``vllm serve`` twice, on CPUs, with N and with twice as many blocks, and sends both the same
requests at the same times: prompts of families that share a prefix, chosen at random. Simulates
each session at both sizes, and prints what comes of it beside what the live engine did.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.command import count

FAMILIES = 14
SHARED_TOKENS = 320
OWN_TOKENS = (16, 96)
OUTPUT_TOKENS = (8, 64)
SEED = 7

Request = tuple[float, list[int], int]
"""When it is sent, in seconds; its prompt; tokens of its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=count, default=80)
    parser.add_argument("--requests", type=count, default=240)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--sessions", type=Path, help="keep the sessions in this new folder")
    options = parser.parse_args()
    requests = list(_requests(options.requests, options.rate))
    sizes = (options.blocks, 2 * options.blocks)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.sessions or Path(scratch)
        sessions = {blocks: _live(folder / str(blocks), blocks, requests) for blocks in sizes}
        for line in _table(sessions, folder / "model"):
            print(line, flush=True)


def _requests(number: int, rate: float) -> Any:
    choose, at = random.Random(SEED), 0.0
    shared = [choose.choices(range(3, 250), k=SHARED_TOKENS) for _ in range(FAMILIES)]
    # A few families are asked for often, most of them now and then.
    weights = [1 / (rank + 1) for rank in range(FAMILIES)]
    for _ in range(number):
        at += choose.expovariate(rate)
        own = choose.choices(range(3, 250), k=choose.randint(*OWN_TOKENS))
        prompt = choose.choices(shared, weights)[0] + own
        yield at, prompt, choose.randint(*OUTPUT_TOKENS)


def _live(folder: Path, blocks: int, requests: list[Request]) -> Path:
    from tests.support.engine import START_SECONDS, Lab, wait_until_settled

    folder.mkdir(parents=True)
    lab = Lab(folder)
    size = f"--num-gpu-blocks-override={blocks}"
    with lab.server("serve", size, "--max-model-len=1024") as server:
        server.wait_until_ready(START_SECONDS)
        print(f"    serving with {blocks} blocks", file=sys.stderr, flush=True)
        _send(server.port, requests)
        server.stop()
    wait_until_settled(lab.sessions("serve"))
    session: Path = next(lab.sessions("serve").glob("session_*"))
    return session


def _send(port: int, requests: list[Request]) -> None:
    """Send each when its time has come, whatever became of those before it."""
    from tests.support.engine import Answer

    def ask(prompt: list[int], output: int) -> None:
        answer = Answer(port, prompt, output)
        answer.read()
        answer.close()

    # What a first request takes is no measure of the others.
    ask(list(range(3, 40)), 4)
    began = time.monotonic()
    with ThreadPoolExecutor(len(requests)) as clients:
        pending = []
        for at, prompt, output in requests:
            time.sleep(max(0.0, began + at - time.monotonic()))
            pending.append(clients.submit(ask, prompt, output))
        for one in pending:
            one.result()


def _table(sessions: dict[int, Path], model: Path) -> Any:
    from profilemate.simulation.parts import write_model
    from profilemate.simulation.worker import ENVIRONMENT
    from tests.whatif.simulating import Recorded

    os.environ.update(ENVIRONMENT)
    write_model(model)
    sources = {blocks: Recorded(session) for blocks, session in sessions.items()}
    yield "| simulated at | recorded at | hit rate | evictions | preemptions | steps | queue mean |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for blocks in sources:
        yield _row(blocks, "live", sources[blocks].measured)
        for recorded_at, source in sources.items():
            yield _row(blocks, f"{recorded_at} blocks", source.simulate(model, blocks))
    for blocks, source in sources.items():
        yield f"{blocks} blocks: {source.step_time}"


def _row(blocks: int, source: str, found: Any) -> str:
    cells = (
        f"{blocks} blocks",
        source,
        f"{100 * (found.hit_rate or 0):.2f} %",
        f"{found.evictions:,}",
        f"{found.preemptions:,}",
        f"{found.steps:,}",
        f"{1e3 * (found.queue_mean_sec or 0):.1f} ms",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
