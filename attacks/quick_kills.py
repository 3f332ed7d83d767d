# SPDX-License-Identifier: Apache-2.0
"""SIGKILL, at a random moment, to an engine that never waits for anything.

The engine is a fork that drives vLLM's own scheduler with 128 running requests, one step after the
other. It notes when each step ended in memory that it shares with the attack. What is missing in
the tables is what the kill has cost.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from attacks.figure import Figure
from attacks.watching import watch_schedulers
from profilemate import collector
from tests.kv.children import Child, Say
from tests.kv.recording import Tables, hooks_only, only_session
from tests.support.scheduler import RequestMaker, answer, build_scheduler, tokens, write_model

RUNNING = 128
BLOCKS = 32 * RUNNING
FIRST_SEC, LAST_SEC = 0.1, 0.8
"""When the engine is killed, counted from its first step."""
LOST_SEC = 0.01
"""What the kill may cost besides the step under way."""
MOST_STEPS = 20_000
_NUMBER = struct.Struct("q")
_TIME = struct.Struct("d")


class Steps:
    """When each step ended, in memory that outlives the process which notes it."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _NUMBER.size + _TIME.size * MOST_STEPS)
        self._count = 0

    def add(self) -> None:
        """A step has ended."""
        at = _NUMBER.size + _TIME.size * self._count
        _TIME.pack_into(self._shared, at, time.monotonic())
        self._count += 1
        _NUMBER.pack_into(self._shared, 0, self._count)

    def ended(self) -> list[float]:
        (count,) = _NUMBER.unpack_from(self._shared)
        return list(struct.unpack_from(f"{count}d", self._shared, _NUMBER.size))


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    chance = random.Random(seed)
    model = write_model(folder / "model")
    watch_schedulers()
    lost_steps, lost_sec, unsound = [], [], 0
    for number in range(count):
        steps, is_sound, ended = attempt(model, folder / str(number), chance)
        unsound += not is_sound
        lost_steps.append(len(ended) - steps)
        # From the end of the last step that is there to that of the last one that was.
        lost_sec.append(ended[-1] - ended[steps - 1] if 0 < steps < len(ended) else 0.0)
        if sys.stdout.isatty() or number % 20 == 19:
            print(f"  {number + 1} of {count}", flush=True)
    lost = zip(lost_steps, lost_sec, strict=True)
    beyond = sum(steps > 1 and sec > LOST_SEC for steps, sec in lost)
    return [
        Figure("kills", count),
        Figure("steps lost, median", median(lost_steps)),
        Figure("steps lost, at most", max(lost_steps)),
        Figure("time of the lost steps, median", 1e3 * median(lost_sec), "ms"),
        Figure("time of the lost steps, at most", 1e3 * max(lost_sec), "ms"),
        Figure(f"kills that cost more than {1e3 * LOST_SEC:.0f} ms and a step", beyond),
        Figure("sessions not complete, or with mismatches", unsound, most=0),
    ]


def attempt(model: Path, folder: Path, chance: random.Random) -> tuple[int, bool, list[float]]:
    """Kill an engine; returns how many steps its tables have, whether these are sound, and when
    each of the engine's steps ended."""
    folder.mkdir()
    steps = Steps()
    child = Child(_engine(model, folder, steps))
    child.next()
    time.sleep(chance.uniform(FIRST_SEC, LAST_SEC))
    child.kill()
    code = child.end()
    assert code == -signal.SIGKILL, f"the engine ended with {code}"
    session = only_session(folder)
    collector.finalize(session)
    tables = Tables(session)
    recorded = sum(row["repeats"] for row in tables.rows("scheduler_steps.csv"))
    metadata = tables.metadata
    mismatches = sum(process["mismatches"] for process in metadata["processes"])
    return recorded, metadata["complete"] and not mismatches, steps.ended()


def _engine(model: Path, folder: Path, steps: Steps) -> Callable[[Say], None]:
    def engine(say: Say) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with hooks_only(folder):
            scheduler = build_scheduler(model, BLOCKS, max_num_seqs=RUNNING)
            make, chance = RequestMaker(), random.Random(1)
            for number in range(RUNNING):
                scheduler.add_request(_request(make, number, chance))
            say("ready")
            while True:
                output = scheduler.schedule()
                scheduler.update_from_output(output, answer(scheduler, output))
                steps.add()
                while len(scheduler.requests) < RUNNING:
                    number += 1
                    scheduler.add_request(_request(make, number, chance))

    return engine


def _request(make: RequestMaker, number: int, chance: random.Random) -> object:
    prompt = tokens(0, 256) + tokens(number + 1, chance.randint(1, 512))
    return make(f"request-{number}", prompt, chance.randint(1, 200))
