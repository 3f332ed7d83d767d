# SPDX-License-Identifier: Apache-2.0
"""Read sessions on a Ray cluster: each is a task, on a node that has it.

Nothing but this module imports Ray.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from analysis.errors import SessionError
from analysis.fleet.merging import Failed
from profilemate.fleet.local import THREADS
from profilemate.fleet.order import Order
from profilemate.fleet.reading import Read, read

RETRIES = 3
"""Of a task whose node, or whose process, has gone."""
CONNECT_SEC = 10.0
AT_ONCE = 2
"""Tasks for each processor of the cluster, so that none waits for the next one."""
MISSING = (
    "--ray needs Ray, which is not installed here; pip install 'profilemate[ray]', or leave --ray "
    "out"
)


@contextmanager
def cluster(address: str, jobs: int) -> Iterator[Cluster]:
    """The cluster at this address.

    ``auto`` is the one that this machine belongs to, and ``local`` a new one on this machine, with
    ``jobs`` processors.

    Raises:
        SessionError: Ray is not installed, or nothing answers there.

    """
    try:
        import ray
    except ImportError:
        raise SessionError(MISSING) from None
    _knock(address)
    is_local = address == "local"
    here: dict[str, Any] = (
        {"num_cpus": jobs, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        if is_local
        else {}
    )
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {THREADS: "1"}},
            **here,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        line = str(error).strip().partition("\n")[0]
        raise SessionError(f"no Ray cluster at {address}: {line}") from None
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Find out soon whether anybody answers: Ray itself tries for minutes.

    Raises:
        SessionError: nobody does.

    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SEC).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SessionError(f"no Ray cluster at {address}: {reason}") from None


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
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(task)
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
        except self._ray.exceptions.RayError as error:
            line = str(error).strip().splitlines()[-1] if str(error).strip() else ""
            return Failed(path, f"its task failed on the cluster: {type(error).__name__}: {line}")
        return found
