# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.builder import SessionBuilder


@pytest.fixture(params=[100, 10_000])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read in chunks of so many bytes: of a row or three, or of a few hundred."""
    monkeypatch.setattr("analysis.tables.reading._CHUNK", request.param)


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    """A complete session without a table."""
    return SessionBuilder(tmp_path / "session_20260131_120000_4711_c0ffee")
