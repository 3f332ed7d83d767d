# SPDX-License-Identifier: Apache-2.0
"""A test bench: vLLM's scheduler with the hooks on, a clock of its own, and the tables after it.

Nothing between the scheduler and the tables is replaced. The clock that the hooks read stands
still until the test moves it, so that times in the tables are known in advance, and a thousand
steps a second need no second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from profilemate import collector
from profilemate.record import recorder
from tests.kv import recording
from tests.kv.recording import Clock
from tests.support.scheduler import TINY_LLAMA, RequestMaker, answer, build_scheduler

BLOCK = 16
"""Tokens of a block, in every situation."""

Row = tuple[Any, ...]


@dataclass
class PrefixCounts:
    """What vLLM's own prefix_cache_stats count, summed over the run."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass
class Engine:
    """One scheduler that is being recorded, and how time passes for it."""

    scheduler: Any
    folder: Path
    clock: Clock
    vllm_counts: PrefixCounts = field(default_factory=PrefixCounts)

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, *requests: Any) -> None:
        """Requests arrive."""
        for request in requests:
            self.scheduler.add_request(request)

    def wait(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self.clock.tick(round(seconds * 1e6))

    def schedule(self, seconds: float = 0.01) -> Any:
        """The first half of a step, ``seconds`` after what came before."""
        self.wait(seconds)
        return self.scheduler.schedule()

    def update(self, output: Any, result: Any = None) -> None:
        """The second half of a step; ``result`` is the model's, one token a request if None."""
        result = answer(self.scheduler, output) if result is None else result
        for outputs in self.scheduler.update_from_output(output, result).values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                for name in vars(self.vllm_counts):
                    total = getattr(self.vllm_counts, name)
                    counted = getattr(stats.prefix_cache_stats, name)
                    setattr(self.vllm_counts, name, total + counted)

    def step(self, count: int = 1, seconds: float = 0.01) -> None:
        """Whole steps."""
        for _ in range(count):
            self.update(self.schedule(seconds))

    def run(self, *requests: Any, seconds: float = 0.01) -> int:
        """Requests arrive; step until nothing is left to do. Returns the number of steps."""
        self.add(*requests)
        steps = 0
        while self.scheduler.has_unfinished_requests():
            self.step(seconds=seconds)
            steps += 1
        return steps

    def abort(self, *request_ids: str) -> None:
        """The clients of these requests go away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def tables_if_killed(self, scratch: Path) -> Tables:
        """What would be in the tables if the process were killed now, having waited for its model:
        it goes on, though."""
        recording.wait_until_written()
        return Tables(recording.make_tables(self.folder, scratch).folder)

    def end(self) -> Tables:
        """The process ends in good order, and the session is completed."""
        recorder.close_all()
        collector.finalize(self.folder)
        return Tables(self.folder)


class Tables(recording.Tables):
    """A session's tables, and the parts of them that show a situation."""

    def select(self, table: str, *columns: str, **where: Any) -> list[Row]:
        """These columns of the CSV table's rows whose ``where`` columns have these values."""
        return [
            tuple(row[column] for column in columns)
            for row in self.rows(f"{table}.csv")
            if all(row[name] == value for name, value in where.items())
        ]

    def lookups(self, **where: Any) -> list[Row]:
        """request, query tokens, hit tokens, kind, admitted, lookups.

        A row is closed after a second; here it is one again with those that say the same.
        """
        columns = ("request_id", "query_tokens", "hit_tokens", "kind", "admitted")
        rows = self.select("prefix_cache_lookups", *columns, "lookups", **where)
        return [
            (*key, sum(row[-1] for row in same))
            for key, same in groupby(rows, key=lambda row: row[:-1])
        ]

    def moves(self, **where: Any) -> list[Row]:
        """event, blocks, request, evicted blocks of kv_cache_allocations.csv."""
        columns = ("event", "num_blocks", "request_id", "evicted_blocks")
        return self.select("kv_cache_allocations", *columns, **where)

    def usage(self) -> list[Row]:
        """usage in per cent, held, cached, free, running, waiting."""
        columns = ("num_blocks", "cached_blocks", "free_blocks", "running_reqs", "waiting_reqs")
        return self.select("kv_cache_usage", "usage_pct", *columns)

    def steps(self, *columns: str, **where: Any) -> list[Row]:
        """These columns of scheduler_steps.csv."""
        return self.select("scheduler_steps", *columns, **where)


def size_of(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Bench:
    """Makes engines and their requests; one a test."""

    def __init__(self, model: Path, sessions: Path, clock: Clock) -> None:
        self.clock = clock
        self.sessions = sessions
        self.request = RequestMaker(BLOCK)
        self._model = model

    def engine(self, usable_blocks: int, block_size: int = BLOCK, **arguments: Any) -> Engine:
        """A scheduler whose requests can hold this many blocks: the null block comes on top."""
        known = set(self._folders())
        scheduler = build_scheduler(
            self._model, usable_blocks + 1, block_size=block_size, **arguments
        )
        (folder,) = set(self._folders()) - known
        return Engine(scheduler, folder, self.clock)

    def draft_head(self) -> Path:
        """A folder with the configuration of a draft head for the model."""
        folder = self.sessions.parent / "draft_head"
        folder.mkdir(exist_ok=True)
        content = {**TINY_LLAMA, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    def _folders(self) -> Iterator[Path]:
        return self.sessions.glob("session_*")


def total(rows: Iterable[Row]) -> int:
    """The sum of the last column."""
    return sum(row[-1] for row in rows)
