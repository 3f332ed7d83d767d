# SPDX-License-Identifier: Apache-2.0
"""Journals to damage: of vLLM's own scheduler, and of workers."""

from __future__ import annotations

import multiprocessing
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.watching import watch_schedulers

EXECUTIONS = 20
"""Executions of each worker."""


@dataclass(frozen=True)
class Sample:
    """A session whose processes are gone: its founding file and its journals."""

    name: str
    founding: bytes
    journals: dict[str, bytes]


def make_samples(folder: Path) -> list[Sample]:
    """Record them in a process that is gone afterwards."""
    process = multiprocessing.get_context("spawn").Process(target=_record, args=(folder,))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("the journals to damage could not be recorded")
    return [_sample(place) for place in sorted(folder.glob("sample_*"))]


def _sample(place: Path) -> Sample:
    (session,) = place.glob("session_*")
    paths = sorted((session / "journal").glob("*.journal"))
    journals = {path.name: path.read_bytes() for path in paths}
    founding = (session / "journal" / "session.json").read_bytes()
    shutil.rmtree(place)
    return Sample(place.name.removeprefix("sample_"), founding, journals)


def _record(folder: Path) -> None:
    watch_schedulers()
    _record_engine(folder / "sample_engine", groups="full", killed=False)
    _record_engine(folder / "sample_killed_engine", groups="mamba", killed=True)
    _record_engine(folder / "sample_two_pools", groups="window", killed=False)
    _record_workers(folder / "sample_workers")


class _Clock:
    """Stands in for ``time.monotonic_ns``. No two calls get the same time, as on a real clock."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now

    def tick(self, microseconds: int = 1_000) -> None:
        """Let time pass."""
        self.now += microseconds * 1_000


def _record_engine(folder: Path, *, groups: str, killed: bool) -> None:
    import pytest
    from vllm.v1.core.block_pool import BlockPool

    from profilemate.hooks.kv import watch
    from profilemate.record import recorder
    from tests.kv.recording import found, hooks_only
    from tests.kv.workload import Driver, Setting, scheduler_for
    from tests.support.oracle import Oracle
    from tests.support.scheduler import write_model

    shutil.rmtree(folder, ignore_errors=True)
    model = folder / "model"
    model.mkdir(parents=True)
    write_model(model)

    clock = _Clock()
    # Nor do two samples.
    clock.tick(sum(folder.name.encode()))
    setting = Setting(blocks=24, groups=groups, max_num_seqs=5, max_num_batched_tokens=96)
    name = found(folder, clock)
    with (
        pytest.MonkeyPatch.context() as patch,
        Oracle().watching() as oracle,
        hooks_only(folder, clock, name=name, thread=False),
    ):
        if groups == "window":
            patch.setenv("VLLM_PROFILING", "0")
            made = scheduler_for(model, setting)
            managers = made.kv_cache_manager.coordinator.single_type_managers
            managers[1].block_pool = BlockPool(30, True, setting.block_size)
            managers[1]._null_block = managers[1].block_pool.null_block
            patch.setenv("VLLM_PROFILING", "1")
            watch.watch(made)
        else:
            made = scheduler_for(model, setting)
        driver = Driver(made, oracle, clock, setting)
        for operation in _operations(has_window=groups == "window"):
            driver.do(operation)
        if killed:
            for known in recorder._living():
                known.flush()
                known.forget()


def _operations(*, has_window: bool) -> list[Any]:
    """Some of everything: little, as each byte of it is damaged many times."""
    from tests.kv.workload import Abort, Add, Evict, Reset, Steps, Wait

    chance = random.Random(7)
    operations: list[Any] = []
    for number in range(6):
        operations += [
            Add(chance.randrange(3), chance.randrange(100), 1 + chance.randrange(60), 6),
            Steps(1 + chance.randrange(3)),
        ]
        if number % 3 == 0:
            operations.append(Abort(chance.randrange(8)))
        if number == 4:
            operations += [Reset(), Wait(1_100)]
            operations += [] if has_window else [Evict(1, 3)]
    return [*operations, Steps(6), Add(0, 100, 400, 3), Steps(2), Wait(1_300), Steps(2)]


def _record_workers(folder: Path) -> None:
    from tests.collector import test_following as following
    from tests.collector.journals import WorkerJournal

    shutil.rmtree(folder, ignore_errors=True)
    first, second = (WorkerJournal(folder, rank) for rank in (0, 1))
    # They begin after their headers, and do nothing in the very same nanosecond.
    first._origin += 10_000_000_000
    second._origin += 10_000_000_777
    following.write_story(first, EXECUTIONS)
    first.recorder.close()
    following.write_story(second, EXECUTIONS)
    second.killed()
