# SPDX-License-Identifier: Apache-2.0
"""Simulate configurations on the machines of a Ray cluster, each as a task of its own."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.whatif.configuration import Configuration
from profilemate.cluster import tasks
from profilemate.simulation import worker
from profilemate.simulation.worker import Done, Failed, Task


def simulate(
    address: str,
    task: Task,
    configurations: Sequence[Configuration],
    progress: Callable[[int, int], None] = lambda number, ended: None,
) -> list[Done | Failed]:
    """Simulate each configuration, as ``processes.simulate`` does.

    Raises:
        RuleError: Ray is not installed, or there is no such cluster.

    """
    with tasks.connected(address):
        found = tasks.run(
            _simulated,
            task,
            configurations,
            ended=lambda number, _: progress(number, len(task.workload)),
        )
    return [Failed(one.reason) if isinstance(one, tasks.Failed) else one for one in found]


def _simulated(task: Task, configuration: Configuration) -> Done | Failed:
    """One of them, in a process of Ray's."""
    return worker.simulated(_folder(), configuration, task, lambda progress: None)


@functools.cache
def _folder() -> Path:
    """The process's own folder; it is quiet from then on. vLLM is imported once in it."""
    folder = Path(tempfile.mkdtemp(prefix="profilemate_"))
    worker.be_quiet(folder)
    return folder
