# SPDX-License-Identifier: Apache-2.0
"""Fleets of real schedulers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.replicas import Deployment


@pytest.fixture
def deployment(model: Path, hooks_on: None, tmp_path: Path) -> Deployment:
    """A deployment without a replica so far."""
    return Deployment(model, tmp_path / "sessions")
