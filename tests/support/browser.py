# SPDX-License-Identifier: Apache-2.0
"""A real browser: fixtures for a conftest to take."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from scripts.browser import HOW, Found, is_required, start_first


class NoBrowser(pytest.skip.Exception):
    """Every test that needs a browser is skipped."""


@pytest.fixture(scope="package")
def found() -> Iterator[Found]:
    """A browser that has started. Without one its tests are skipped, or fail if it is required."""
    with sync_playwright() as playwright:
        notes: list[str] = []
        first = start_first(playwright, notes.append)
        if first is None:
            missing = "; ".join([f"no browser: {HOW}", *notes])
            if is_required():
                pytest.fail(missing, pytrace=False)
            raise NoBrowser(missing)
        yield first
        first.browser.close()


@pytest.fixture(scope="package")
def browser(found: Found) -> Browser:
    return found.browser


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """All that are skipped without a browser, in one line of pytest's summary."""
    report = yield
    if call.excinfo and call.excinfo.errisinstance(NoBrowser):
        # pytest puts those on one line that were skipped in one place.
        report.longrepr = (__file__, None, str(call.excinfo.value))
    return report
