# SPDX-License-Identifier: Apache-2.0
"""A session of vLLM's real scheduler that goes on: its tables are made as far as the test wants."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profilemate.collector.follow import Follower
from tests.kv.recording import Clock, hooks_only, only_session, wait_until_written
from tests.support.scheduler import RequestMaker, answer, build_scheduler, tokens


class Running:
    """A scheduler, its clock, and the folder of its tables, which ``write`` brings up to date."""

    def __init__(self, scheduler: Any, clock: Clock, session: Path, tables: Path) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.folder = tables
        self.make = RequestMaker()
        self._began = clock.now
        self._wall = time.time()
        tables.mkdir()
        self._follower = Follower(session, tables)
        self.held: dict[str, int] = {}
        """Blocks of each running request, by vLLM's own table, when the last step was scheduled."""

    def add(self, name: str, prompt: list[int], answers: int) -> None:
        """A request arrives."""
        self.scheduler.add_request(self.make(name, prompt, answers))

    def step(self, count: int = 1, seconds: float = 0.01) -> None:
        """Whole steps."""
        for _ in range(count):
            self.clock.tick(round(seconds * 1e6))
            output = self.scheduler.schedule()
            self._count_held()
            self.clock.tick(100)
            self.scheduler.update_from_output(output, answer(self.scheduler, output))

    def _count_held(self) -> None:
        manager = self.scheduler.kv_cache_manager
        self.held = {
            request.request_id: sum(map(len, manager.get_block_ids(request.request_id)))
            for request in self.scheduler.running
        }

    def abort(self, *names: str) -> None:
        """Clients go away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def write(self, *, age_sec: float = 0.0) -> None:
        """Bring the tables and the figures up to date. They are as old as the clock says, if the
        test began a moment ago, and ``age_sec`` older."""
        wait_until_written()
        self._follower.discover()
        while self._follower.read():
            self._follower.apply()
        self._follower.apply()
        self._follower.write(ended=False)
        seconds = (self.clock.now - self._began) / 1e9
        when = self._wall + seconds - age_sec
        os.utime(self.folder / "totals.json", (when, when))

    def end(self) -> None:
        """The process has ended, and all is written."""
        self._follower.close()


@contextmanager
def running(model: Path, place: Path, blocks: int, **arguments: Any) -> Iterator[Running]:
    """A scheduler with so many blocks beside the null block."""
    clock = Clock()
    with hooks_only(place / "sessions", clock):
        scheduler = build_scheduler(model, blocks + 1, **arguments)
        session = only_session(place / "sessions")
        yield Running(scheduler, clock, session, place / "session_20260131_120000_4711_c0ffee")


def mixed(live: Running, chance: random.Random, number: int) -> None:
    """A request of one of four families, as ``number`` of all."""
    prompt = [*tokens(chance.randrange(4), 48), *tokens(900 + number, chance.randrange(1, 60))]
    live.add(f"request-{number}", prompt, chance.randrange(1, 40))
