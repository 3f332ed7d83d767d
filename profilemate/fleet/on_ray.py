# SPDX-License-Identifier: Apache-2.0
"""Read sessions on a Ray cluster: a task reads some of them, one after the other.

``profilemate.cluster`` connects to it. What is read is taken as it comes, and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from analysis.errors import RuleError
from analysis.fleet.merging import Failed
from profilemate.cluster import tasks
from profilemate.fleet.local import THREADS
from profilemate.fleet.order import Order
from profilemate.fleet.reading import Read, read

MOST_OF_A_TASK = 8
"""Sessions that one task reads: beginning a task takes as long as reading a small session."""
AT_ONCE = 2
"""Tasks for each processor of the cluster, so that none waits for the next one."""


@contextmanager
def cluster(address: str, jobs: int) -> Iterator[Cluster]:
    """The cluster at this address.

    ``auto`` is the one that this machine belongs to, and ``local`` a new one on this machine, with
    ``jobs`` processors.

    Raises:
        RuleError: Ray is not installed, or nothing answers there.

    """
    with _new(jobs) if address == "local" else tasks.connected(address):
        import ray

        yield Cluster(ray)


@contextmanager
def _new(processors: int) -> Iterator[None]:
    """A cluster of this machine alone, which nobody else can reach."""
    if find_spec("ray") is None:
        raise RuleError(tasks.MISSING)
    import ray

    ray.init(
        address="local",
        num_cpus=processors,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()


class Cluster:
    """A cluster that is connected. ``ray``: the module."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def read_all(
        self, paths: Sequence[str], task: Callable[[str], Read] = read
    ) -> Generator[Read, None, None]:
        """What was read of each session, in their order.

        A task whose node goes is run again on another one.

        Args:
            paths: the sessions.
            task: reads one; a function of a module, as the nodes import it.

        """
        ray = self._ray
        remote = ray.remote(
            num_cpus=1,
            max_retries=tasks.TRIES - 1,
            # The tasks share the processors.
            runtime_env={"env_vars": {THREADS: "1"}},
        )(_several)
        order = Order(paths, self._processors())
        running: dict[Any, list[int]] = {}
        size = min(MOST_OF_A_TASK, max(1, len(paths) // (4 * AT_ONCE * self._processors())))
        try:
            while not order.is_over:
                most = AT_ONCE * self._processors()
                while len(running) < most and (numbers := _next(order, size)):
                    given = [order.path(number) for number in numbers]
                    running[remote.remote(task, given)] = numbers
                ready, _ = ray.wait([*running], num_returns=1)
                for one in ready:
                    numbers = running.pop(one)
                    given = [order.path(number) for number in numbers]
                    for number, found in zip(numbers, self._result(one, given), strict=True):
                        order.done(number, found)
                yield from order.take()
        finally:
            for one in running:
                ray.cancel(one, force=True)

    def _processors(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _result(self, one: Any, paths: Sequence[str]) -> Sequence[Read]:
        try:
            found: list[Read] = self._ray.get(one)
        except self._ray.exceptions.RayTaskError as error:
            why = tasks.reason(error.cause)
        except self._ray.exceptions.RayError as error:
            kind = type(error).__name__
            why = f"its process or machine died, {tasks.TRIES} times: {kind}"
        else:
            return found
        return [Failed(path, why) for path in paths]


def _next(order: Order, size: int) -> list[int]:
    """The numbers of the sessions of the next task; none where none may be begun now."""
    numbers: list[int] = []
    while len(numbers) < size and (number := order.hand_out()) is not None:
        numbers.append(number)
    return numbers


def _several(task: Callable[[str], Read], paths: Sequence[str]) -> list[Read]:
    """The work of a task."""
    return [task(path) for path in paths]
