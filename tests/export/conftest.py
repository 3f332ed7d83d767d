# SPDX-License-Identifier: Apache-2.0
"""A browser for Perfetto, and vLLM's own scheduler for what it opens."""

from __future__ import annotations

from tests.situations.conftest import bench as bench
from tests.support.browser import browser as browser
from tests.support.browser import found as found
from tests.support.browser import pytest_runtest_makereport as pytest_runtest_makereport
