# SPDX-License-Identifier: Apache-2.0
"""The bench that every situation is set up on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from profilemate import recorder
from tests.situations.bench import Bench, set_up


@pytest.fixture
def bench(
    model: Path, hooks_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """A bench of its own for the test; what it leaves open is closed."""
    yield set_up(model, tmp_path / "sessions", monkeypatch)
    recorder.close_all()
