# SPDX-License-Identifier: Apache-2.0
"""``python -m analysis [SESSION] [--json]``: the same as ``profilemate summary``."""

from __future__ import annotations

from profilemate.cli import run

if __name__ == "__main__":
    run("summary", "python -m analysis")
