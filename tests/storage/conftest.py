# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import large_session
from tests.storage import s3


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """The S3 server that all tests of this folder share. Each has a place of its own in it."""
    with s3.server() as port:
        yield port


@pytest.fixture
def front(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Front]:
    """The way to the server, for this process. It drops nothing until it is told."""
    with s3.front(port) as front:
        s3.environment(monkeypatch, front.port)
        monkeypatch.setattr("analysis.tables.storage.FIRST_WAIT_SEC", 0.001)
        yield front


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of this test's own."""
    return f"s3://{s3.BUCKET}/{tmp_path.name}"


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of some size, not to be changed."""
    folder = tmp_path_factory.mktemp("large") / "session_20260131_120000_4711_c0ffee"
    large_session.write(folder, 3_000)
    return folder
