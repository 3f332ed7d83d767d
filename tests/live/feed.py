# SPDX-License-Identifier: Apache-2.0
"""Drive vLLM's scheduler in real time, as a session to watch.

    python -m tests.live.feed [--seconds S] [--rate STEPS]

Whether and where it records is up to the environment, as it is for vLLM. It ends after so many
seconds, or when its stdin is closed.
"""

from __future__ import annotations

import argparse
import random
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens, write_model

BLOCKS = 160
RUNNING = 12
WAITING = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=50, help="steps a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch))
        feed(model, options.seconds, options.rate)


def feed(model: Path, seconds: float, rate: float) -> None:
    """Requests of eight families arrive, and are answered at this pace."""
    scheduler = build_scheduler(model, BLOCKS, max_num_seqs=RUNNING, enable_prefix_caching=True)
    chance, make = random.Random(1), RequestMaker()
    end, number = time.monotonic() + seconds, 0
    next_step = time.monotonic()
    while time.monotonic() < end and not _is_closed(sys.stdin):
        while len(scheduler.running) + len(scheduler.waiting) < RUNNING + WAITING:
            number += 1
            scheduler.add_request(_request(make, chance, number))
        step(scheduler)
        next_step = max(next_step + 1 / rate, time.monotonic() - 1)
        time.sleep(max(0.0, next_step - time.monotonic()))


def _request(make: RequestMaker, chance: random.Random, number: int) -> Any:
    family, own = chance.randrange(8), chance.randrange(20, 120)
    prompt = [*tokens(family, 96), *tokens(1_000 + number, own)]
    return make(f"chatcmpl-{number:05}", prompt, chance.randrange(30, 200))


def _is_closed(stream: Any) -> bool:
    """Whether the other end of the pipe is closed."""
    if stream.isatty():
        return False
    readable, _, _ = select.select([stream], [], [], 0)
    return bool(readable) and not stream.buffer.read1(1)


if __name__ == "__main__":
    main()
