# SPDX-License-Identifier: Apache-2.0
"""A real browser, and pages in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.analysis.builder import SessionBuilder
from tests.report import generated
from tests.report.opened import Opened
from tests.support.browser import browser as browser
from tests.support.browser import found as found
from tests.support.browser import pytest_runtest_makereport as pytest_runtest_makereport

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-c", "from profilemate.cli import main; main()"]


@pytest.fixture(scope="package")
def busy(tmp_path_factory: pytest.TempPathFactory) -> SessionBuilder:
    """A session of 210,000 rows and more in all tables together."""
    folder = tmp_path_factory.mktemp("busy") / "session_20260131_120000_4711_c0ffee"
    return generated.write(folder, 30_000)


@pytest.fixture(scope="package")
def page_of_busy(busy: SessionBuilder) -> Path:
    """Its page, made by the command."""
    return made(busy.folder)


@pytest.fixture(scope="package")
def page_of_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with two charts, which is quick to open."""
    session = SessionBuilder(tmp_path_factory.mktemp("small") / "session_small")
    session.usage((0, 50), (5, 20))
    return made(session.folder)


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    """A complete session without a table."""
    return SessionBuilder(tmp_path / "session_20260131_120000_4711_c0ffee")


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    """Opens a page from disk; at the end it must have had no trouble."""
    with Opened(browser) as pages:
        yield pages
        assert pages.trouble == []


def made(session: Path, *arguments: str) -> Path:
    """The page that the command makes of a session."""
    result = run("report", str(session), *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return Path(result.stdout.removesuffix("\n"))


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments], check=False, cwd=ROOT, capture_output=True, text=True, **more
    )
