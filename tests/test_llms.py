# SPDX-License-Identifier: Apache-2.0
"""llms.txt names every page of the documentation, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_page_is_named() -> None:
    named = set(re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text()))
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - {"docs/index.md"}
    assert pages <= named
    assert all((ROOT / path).is_file() for path in named)
