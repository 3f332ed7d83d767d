# SPDX-License-Identifier: Apache-2.0
"""``python -m profilemate COMMAND``: ``profilemate COMMAND`` where it is not installed."""

from __future__ import annotations

from profilemate.cli import run

if __name__ == "__main__":
    run(None, "python -m profilemate")
