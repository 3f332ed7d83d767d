# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.builder import SessionBuilder


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    """A complete session without a table."""
    return SessionBuilder(tmp_path / "session_20260131_120000_4711_c0ffee")
