# SPDX-License-Identifier: Apache-2.0
"""How is work spread over the machines of a Ray cluster, so that its result is the same as here?

    with tasks.connected("10.0.0.1:6379"):
        found = tasks.run(work, shared, items)      # work(shared, item) of each, in their order

A task whose machine or process dies is run again elsewhere. An error of the work itself would come
again, and is not: it is the result of that item.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from analysis.errors import RuleError
from profilemate.installing import pip_install

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

TRIES = 4
"""How often a task is begun, where machines or processes die under it."""

LOOK_SEC = 0.5
"""How long a wait for results may keep an interrupt waiting."""

CANCELLED_SEC = 10
"""How long tasks that are given up may take to end."""

CONNECT_SEC = 10.0
"""How long a cluster may take to accept a connection."""

LONGEST_REASON = 400

MISSING = f"--ray needs Ray, which is not installed; {pip_install('ray')}"

_PACKAGES = ("analysis", "profilemate")


@dataclass(frozen=True)
class Failed:
    """Why an item has no result."""

    reason: str


@contextmanager
def connected(address: str, runtime_env: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Be a driver of this cluster within the block.

    What is printed to stdout within it goes nowhere, as Ray would say there which machines died.

    Args:
        address: as ``ray.init`` takes it: ``host:port``, ``ray://host:port``, or ``auto`` for the
            cluster that this machine belongs to.
        runtime_env: what the machines' processes begin with. By default they get this
            profilemate's own code, for as long as the block takes; what it imports has to be
            installed there.

    Raises:
        RuleError: Ray is not installed, or there is no such cluster.

    """
    if find_spec("ray") is None:
        raise RuleError(MISSING)
    if not address or address == "local":
        raise RuleError(f"--ray: {address!r} is no address; write host:port or auto")
    _knock(address)
    # What profilemate does on a cluster is nobody else's business.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        _connect(address, _own_code() if runtime_env is None else runtime_env)
        try:
            yield
        finally:
            ray.shutdown()


def _own_code() -> dict[str, Any]:
    root = Path(__file__).resolve().parent.parent.parent
    modules = [str(root / package) for package in _PACKAGES]
    return {"py_modules": modules, "excludes": ["**/__pycache__/"]}


def _knock(address: str) -> None:
    """Find out soon whether anybody answers: Ray itself tries for minutes.

    Raises:
        RuleError: nobody does.

    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SEC).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RuleError(f"--ray {address}: no cluster can be reached: {why}") from None


def _connect(address: str, runtime_env: Mapping[str, Any]) -> None:
    import ray

    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env=dict(runtime_env),
        )
    except Exception as error:
        raise RuleError(f"--ray {address}: no cluster can be reached: {reason(error)}") from None


def run(
    work: Callable[[Shared, Item], Result],
    shared: Shared,
    items: Sequence[Item],
    *,
    gpus: float = 0,
    cpus: float = 1,
    ended: Callable[[int, Result | Failed], None] = lambda number, result: None,
) -> list[Result | Failed]:
    """What the work gives for each item, in their order.

    Args:
        work: a function of a module of profilemate's, called with what is shared and an item.
        shared: sent to each machine once.
        items: one for each task.
        gpus: that a task needs; ``CUDA_VISIBLE_DEVICES`` names them there.
        cpus: that a task needs.
        ended: called here with the number of each item as soon as its result is known, and the
            result.

    """
    import ray

    remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=TRIES - 1)(work)
    everywhere = ray.put(shared)
    number_of = {remote.remote(everywhere, item): number for number, item in enumerate(items)}
    results: dict[int, Result | Failed] = {}
    pending = list(number_of)
    try:
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=LOOK_SEC)
            for one in done:
                number = number_of.pop(one)
                results[number] = _result(ray, one)
                ended(number, results[number])
    finally:
        for one in pending:
            with suppress(Exception):
                ray.cancel(one)
        if pending:
            # What they started is to end before the processes do.
            ray.wait(pending, num_returns=len(pending), timeout=CANCELLED_SEC)
    return [results[number] for number in range(len(items))]


def most_gpus() -> float:
    """The GPUs of the machine that has the most."""
    import ray

    return max(
        (node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0
    )


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return Failed(reason(error.cause))
    except ray.exceptions.RayError as error:
        return Failed(f"its process or machine died, {TRIES} times: {type(error).__name__}")


def reason(error: BaseException) -> str:
    """An error's type and what it says, in one line."""
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."
