# SPDX-License-Identifier: Apache-2.0
"""What the collector complains of: lines on stderr, which is a file of the session."""

from __future__ import annotations

import contextlib
import sys


def complain(line: str) -> None:
    """Write one line. The disk that it goes to may be the full one that it tells of: then it comes
    with the next line that has room."""
    with contextlib.suppress(OSError, ValueError):
        print(*line.splitlines(), file=sys.stderr, flush=True)
