# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: a fixture ``kv``. ``docs/contract.md`` shows how to use it.

Every pytest of an environment with profilemate loads this module, so it imports nothing at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from profilemate.contract.contract import Contract
    from profilemate.simulation.processes import Simulations


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kv-update``."""
    parser.getgroup("profilemate").addoption(
        "--kv-update",
        action="store_true",
        help="Write what runs of prompts are now into the files of kv.assert_unchanged.",
    )


@pytest.fixture(scope="session")
def _kv_simulations() -> Iterator[Simulations]:
    """A process that imports vLLM at the first run, and serves all tests."""
    from profilemate.simulation.processes import Simulations

    with Simulations(1) as simulations:
        yield simulations


@pytest.fixture
def kv(request: pytest.FixtureRequest, _kv_simulations: Simulations) -> Contract:
    """What vLLM's prefix cache finds of prompts."""
    from profilemate.contract.contract import Contract

    update = bool(request.config.getoption("--kv-update"))
    return Contract(_kv_simulations, request.path.parent, update=update)
