# SPDX-License-Identifier: Apache-2.0
"""The bench that every situation is set up on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv.recording import Clock, hooks_only
from tests.situations.bench import Bench


@pytest.fixture
def bench(model: Path, hooks_on: None, tmp_path: Path) -> Iterator[Bench]:
    """A bench of its own for the test; what it leaves open is closed."""
    sessions, clock = tmp_path / "sessions", Clock()
    with hooks_only(sessions, clock):
        yield Bench(model, sessions, clock)
