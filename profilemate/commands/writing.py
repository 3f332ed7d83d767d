# SPDX-License-Identifier: Apache-2.0
"""Write what a verb made into a file: whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from analysis.errors import SessionError
from profilemate.session import write_atomically


def write(path: Path, text: str) -> None:
    """Write the text; a file that is there already is replaced.

    Raises:
        SessionError: it cannot be written.

    """
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise SessionError(f"cannot write {path}: {error.strerror or error}") from None
