# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share: vLLM with the hooks attached, and a model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.scheduler import write_model

# The same examples each time: a run says what a change did. To look for more:
# pytest --hypothesis-profile explore
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile("steady")


# The slowest tests begin first: all others wait for a slow test that begins last.
SLOW_FIRST = ("tests/engine/", "tests/releases/", "tests/kv/", "tests/plan/", "tests/sweep/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow folders first; the order within each stays."""

    def place(item: pytest.Item) -> int:
        slow = [item.nodeid.startswith(folder) for folder in SLOW_FIRST]
        return slow.index(True) if any(slow) else len(slow)

    items.sort(key=place)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny Llama."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def hooks_on() -> Iterator[None]:
    """Every Scheduler that is made is watched. Importing vLLM for it takes half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        # A line for each of a thousand schedulers would bury what a failing test says.
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm.v1.core.sched.scheduler as module

        from profilemate.hooks.kv import scheduler

        before = module.Scheduler.__init__
        scheduler.attach(module)
        yield
        module.Scheduler.__init__ = before
