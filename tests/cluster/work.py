# SPDX-License-Identifier: Apache-2.0
"""What the tests have a cluster do."""

from __future__ import annotations

import os
import time
from pathlib import Path


def times(factor: int, number: int) -> int:
    """The product; a later item is done sooner."""
    time.sleep(0.3 if number == 1 else 0)
    return factor * number


def refused(limit: int, number: int) -> int:
    if number > limit:
        raise ValueError(f"{number} is more than {limit}")
    return number


def dying(folder: str, number: int) -> int:
    """Its process dies with the first try."""
    begun = Path(folder) / str(number)
    if number % 2 and not begun.exists():
        begun.touch()
        os._exit(1)
    return number


def always_dying(_: None, number: int) -> int:
    if number:
        os._exit(1)
    return number


def slow(folder: str, number: int) -> int:
    """Notes where it runs, then takes its time."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    with open(Path(folder) / f"{number}", "a") as file:
        file.write(f"{node}\n")
    time.sleep(2)
    return number


def home(_: None, number: int) -> str:
    """From where profilemate is."""
    import profilemate

    return profilemate.__file__


def recorded(root: str, model: str, seed: int) -> tuple[int, list[str]]:
    """Run vLLM's scheduler with nothing but what the process began with.

    Returns:
        The process id, and the places from which profilemate and the variables came.

    """
    import sys

    # For the tests' own modules alone: it comes last.
    sys.path.append(root)
    from tests.support import scheduler

    driven = scheduler.build_scheduler(Path(model), 64)
    request = scheduler.RequestMaker()(f"request-{seed}", scheduler.tokens(seed, 100 + seed), 4)
    scheduler.drive(driven, [(0.0, request)])
    import profilemate

    return os.getpid(), [profilemate.__file__, os.environ["VLLM_PROFILING_DIR"]]
