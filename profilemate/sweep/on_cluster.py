# SPDX-License-Identifier: Apache-2.0
"""Make the runs of a sweep on the machines of a Ray cluster, where GPUs are free.

Each run is a task. It runs in a folder of its own on its machine, is measured there, and its folder
comes back packed, with the session, once it has ended.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profilemate import ROOT, door
from profilemate.cluster import tasks
from profilemate.messages import say
from profilemate.sweep import folder, sweeping
from profilemate.sweep.folder import LOG_FILE, Plan, Planned
from profilemate.sweep.progress_line import Progress
from profilemate.sweep.running import Interrupts


@dataclass(frozen=True)
class Where:
    """``address``: of the cluster. ``gpus``: that each run needs, all on one machine."""

    address: str
    gpus: float


@dataclass(frozen=True)
class _Shared:
    """What all runs have in common. ``door``: the text of ``sitecustomize.py``."""

    plan: Plan
    time_limit: float | None
    door: bytes


@dataclass(frozen=True)
class _Made:
    """A run's result, and its folder as a packed archive."""

    result: dict[str, Any]
    archive: bytes


def sweep(
    where: Where,
    plan: Plan,
    directory: Path,
    *,
    time_limit: float | None,
    retry_failed: bool,
) -> None:
    """Make every run that has no result yet, as many at once as there is room for.

    A KeyboardInterrupt gives up those that have not ended. The next sweep in the folder makes them
    anew.

    Args:
        where: the cluster.
        plan: the sweep.
        directory: its folder, on this machine.
        time_limit: a run is stopped after so many seconds.
        retry_failed: make those anew that failed.

    Raises:
        RuleError: Ray is not installed, or there is no such cluster.

    """
    every = list(plan.runs(directory))
    runs = sweeping.to_make(every, retry_failed=retry_failed)
    progress = Progress(len(every))
    shared = _Shared(plan, time_limit, Path(door.folder(), door.FILE).read_bytes())

    def came(number: int, made: _Made | tasks.Failed) -> None:
        run = runs[number]
        folder.make_anew(run)
        if isinstance(made, tasks.Failed):
            (run.folder / LOG_FILE).touch()
            result = _failed(made.reason)
        else:
            result = made.result
            _unpack(made.archive, run.folder)
        folder.write_result(run, result)
        outcome = sweeping.outcome_of(result)
        progress.ended(every.index(run) + 1, run.name, result["seconds"], outcome)

    if not runs:
        return
    with tasks.connected(where.address):
        if tasks.most_gpus() < where.gpus:
            say(f"no machine of the cluster has {where.gpus:g} GPUs; the runs wait for one")
        tasks.run(_make, shared, runs, gpus=where.gpus, ended=came)


def _unpack(content: bytes, into: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        archive.extractall(into, filter="data")


def _failed(why: str) -> dict[str, Any]:
    return {
        "state": "failed",
        "why": why,
        "exit_code": None,
        "seconds": 0.0,
        "log": LOG_FILE,
        "cores": None,
        "others_cores": None,
    }


def _make(shared: _Shared, run: Planned) -> _Made:
    """Make one of them, on a machine of the cluster."""
    with tempfile.TemporaryDirectory(prefix="profilemate_") as scratch:
        here = replace(run, folder=Path(scratch, run.folder.name))
        lock = os.open(Path(scratch, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            result = sweeping.made(
                shared.plan,
                here,
                lock=lock,
                interrupts=Interrupts(),
                time_limit=shared.time_limit,
                tick=lambda seconds: None,
                recorder=_recorder(shared.door),
            )
        finally:
            os.close(lock)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for entry in sorted(here.folder.iterdir()):
                archive.add(entry, entry.name)
        return _Made(result, packed.getvalue())


@functools.cache
def _recorder(content: bytes) -> str:
    """The folder that is to be on the runs' PYTHONPATH: Ray brings the package alone."""
    made = Path(tempfile.mkdtemp(prefix="profilemate_"))
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(Path(ROOT, "profilemate"), made / "profilemate", ignore=ignored)
    (made / door.FILE).write_bytes(content)
    return str(made)
