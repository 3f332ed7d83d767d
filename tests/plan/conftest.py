# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.analysis.conftest import session

__all__ = ["session"]
