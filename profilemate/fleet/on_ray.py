# SPDX-License-Identifier: Apache-2.0
"""Read sessions on a Ray cluster: each is a task, on a node that has it.

``profilemate.cluster`` connects to it. What is read is taken as it comes, and not kept.
"""

from __future__ import annotations

import socket
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

CONNECT_SEC = 10.0
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
    _knock(address)
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


def _knock(address: str) -> None:
    """Find out soon whether anybody answers: Ray itself tries for minutes.

    Raises:
        RuleError: nobody does.

    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SEC).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RuleError(f"--ray {address}: no cluster can be reached: {reason}") from None


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
        )(task)
        order = Order(paths, self._processors())
        running: dict[Any, int] = {}
        try:
            while not order.is_over:
                most = AT_ONCE * self._processors()
                while len(running) < most and (number := order.hand_out()) is not None:
                    running[remote.remote(order.path(number))] = number
                ready, _ = ray.wait([*running], num_returns=1)
                for one in ready:
                    number = running.pop(one)
                    order.done(number, self._result(one, order.path(number)))
                yield from order.take()
        finally:
            for one in running:
                ray.cancel(one, force=True)

    def _processors(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _result(self, one: Any, path: str) -> Read:
        try:
            found: Read = self._ray.get(one)
        except self._ray.exceptions.RayTaskError as error:
            return Failed(path, tasks.reason(error.cause))
        except self._ray.exceptions.RayError as error:
            kind = type(error).__name__
            return Failed(path, f"its process or machine died, {tasks.TRIES} times: {kind}")
        return found
